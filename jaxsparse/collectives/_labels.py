"""A collective and its options as one string, as in profiles and `special=`: "spardl:teams=2:density=0.01"."""

import ast
from collections.abc import Mapping
from typing import Any


def label_of(name: str, config: Mapping[str, Any]) -> str:
  """The label of a collective with these options; the density comes last.

  Example:
    >>> label_of("spardl", {"density": 0.01, "teams": 2})
    'spardl:teams=2:density=0.01'
  """
  last = {"density": config["density"]} if "density" in config else {}
  options = {key: value for key, value in config.items() if key not in last} | last
  return ":".join([name, *(f"{key}={value}" for key, value in options.items())])


def collective_of(label: str) -> tuple[str, dict[str, Any]]:
  """The name and the options of a label.

  Raises:
    ValueError: for an option that is not of the form option=value.

  Example:
    >>> collective_of("spardl:teams=2:density=0.01")
    ('spardl', {'teams': 2, 'density': 0.01})
  """
  name, *options = label.split(":")
  config = {}
  for option in options:
    key, separator, text = option.partition("=")
    if not separator:
      raise ValueError(f"{label}: {option!r} is not of the form option=value")
    config[key] = _value(text)
  return name, config


def _value(text: str) -> Any:
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return text

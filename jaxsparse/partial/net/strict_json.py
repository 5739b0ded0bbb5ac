"""JSON of other processes: size and depth are bounded before it is parsed, and numbers before they are used.

`json` recurses for each bracket and raises RecursionError, which is no ValueError, for
a hundred thousand of them.
"""

import json
import math
import re
import sys
from typing import Any

MOST_DEPTH = 8  # brackets within brackets; messages of this library have 4
LONGEST = 1 << 26  # bytes: the addresses of the largest group
# A possessive quantifier keeps no state for each character of a string.
_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[{\]}]', re.DOTALL)


def parse(content: bytes | str) -> Any:
  """The value of a JSON text.

  Raises:
    ValueError: if the text is not JSON, is longer than `LONGEST`, or has more than
      `MOST_DEPTH` brackets within each other.

  Example:
    >>> parse(b'[[1, "["]]')
    [[1, '[']]
    >>> parse("[" * 100_000)
    Traceback (most recent call last):
    ...
    ValueError: JSON with more than 8 brackets within each other
  """
  if len(content) > LONGEST:
    raise ValueError(f"JSON of {len(content)} bytes, choose at most {LONGEST}")
  text = content if isinstance(content, str) else content.decode()
  depth = 0
  # Tokens are brackets, and whole strings: brackets within strings do not count.
  for token in _TOKEN.finditer(text):
    first = text[token.start()]
    depth += (first in "[{") - (first in "]}")
    if depth > MOST_DEPTH:
      raise ValueError(f"JSON with more than {MOST_DEPTH} brackets within each other")
  return json.loads(text)


def is_whole(value: Any, least: int = 0, most: int = 2**63 - 1) -> bool:
  """Whether a value is a whole number within bounds; True and False are none."""
  return type(value) is int and least <= value <= most


def is_number(value: Any) -> bool:
  """Whether a value is a number that a float can hold, and not NaN."""
  # A whole number of JSON may be too large for a float, and would end its arithmetic.
  return type(value) in (int, float) and (
    abs(value) <= sys.float_info.max or abs(value) == math.inf
  )

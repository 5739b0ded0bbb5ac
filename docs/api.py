"""Writes the tables of docs/reference/index.md, one line for each public name: `python docs/api.py`."""

import importlib
import inspect
import pathlib
import re

import jaxsparse as js

REFERENCE = pathlib.Path(__file__).parent / "reference"
PAGES = (
  "training",
  "transforms",
  "collectives",
  "costs",
  "overlap",
  "partial",
  "weights",
  "launch",
  "doctor",
  "comm",
)
_START = "<!-- written by docs/api.py -->\n"


def members(text: str) -> list[tuple[str, object]]:
  """(name below `jaxsparse`, object) of what a page of the reference documents, in its order."""
  found = []
  for kind, name, options in re.findall(
    r"^\.\. auto(\w+):: (\S+)\n((?: +:.*\n)*)", text, re.MULTILINE
  ):
    if kind == "module":
      module = importlib.import_module(name)
      left_out = re.findall(
        r"\w+", "".join(re.findall(r":exclude-members:(.*)", options))
      )
      prefix = name.removeprefix("jaxsparse.")
      found += [
        (f"{prefix}.{one}", getattr(module, one))
        for one in module.__all__
        if one not in left_out
      ]
    elif kind != "data" and "." not in name:  # others are what a function returns
      found.append((name, getattr(js, name)))
  return found


def table(page: str) -> str:
  """A heading that links to the page, and a line for each of its names."""
  text = (REFERENCE / f"{page}.rst").read_text()
  lines = [f"## [{text.splitlines()[0]}]({page}.rst)", "", "| | |", "|---|---|"]
  for name, found in members(text):
    first = " ".join((inspect.getdoc(found) or "").partition("\n\n")[0].split())
    lines += (
      [f"| `js.{name}` | {first.replace('|', chr(92) + '|')} |"]
      if callable(found) and first
      else []
    )
  return "\n".join(lines)


def page() -> str:
  """docs/reference/index.md as it should be."""
  before, _, after = (REFERENCE / "index.md").read_text().partition(_START)
  rest = after[after.index("```{toctree}") :]
  return (
    before + _START + "\n" + "\n\n".join(table(name) for name in PAGES) + "\n\n" + rest
  )


if __name__ == "__main__":
  (REFERENCE / "index.md").write_text(page())

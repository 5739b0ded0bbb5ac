"""Makes docstrings reStructuredText, links names of the library, and warns of public names that no page documents."""

import importlib
import re
from typing import Any

import docutils.nodes
import sphinx.addnodes
import sphinx.application
import sphinx.transforms
import sphinx.util.logging

import jaxsparse as js

PUBLIC = ("comm", "costs", "doctor", "launch", "overlap", "partial", "select", "sparse")
"""Packages besides `jaxsparse` itself whose `__all__` is in the reference."""

_SECTION = re.compile(
  r"(Args|Attributes|Example|Examples|Raises|Returns|Warns|Yields):$"
)
_NAME = re.compile(r"js\.([A-Za-z_][\w.]*)(\(.*\))?")
_log = sphinx.util.logging.getLogger(__name__)


def connect(app: sphinx.application.Sphinx) -> None:
  """Connects all of this module to a build."""
  # before napoleon
  app.connect("autodoc-process-docstring", _mark_literal_blocks, priority=400)
  app.connect("autodoc-skip-member", _skip_field)
  app.connect("env-check-consistency", _check_coverage)
  app.add_transform(LinkNames)


def literal_blocks(lines: list[str]) -> list[str]:
  r"""The lines of a docstring with `::` before each indented block outside of its sections: formulas and drawings.

  Example:
    >>> literal_blocks(["It sends:", "", "    0 -> 1", "", "Args:", "  x: a number."])
    ['It sends:', '', '::', '', '    0 -> 1', '', 'Args:', '  x: a number.']
  """
  found: list[str] = []
  section = False
  for line in lines:
    if line and not line[0].isspace():
      section = bool(_SECTION.match(line))
    begins = (
      line.startswith("  ")
      and not section
      and len(found) > 1
      and not found[-1]
      and found[-2][:1].strip()
    )
    found += ["::", "", line] if begins else [line]
  return found


def _mark_literal_blocks(
  app: Any, what: str, name: str, of: Any, options: Any, lines: list[str]
) -> None:
  del app, name, of, options
  # A page says itself what its module is; the docstring of a constant is that of its
  # type.
  lines[:] = [] if what in ("module", "data") else literal_blocks(lines)


def _skip_field(
  app: Any, what: str, name: str, of: Any, skip: bool, options: Any
) -> bool | None:
  """Skips the fields of a NamedTuple: its docstring describes them, theirs say "alias for field number 0"."""
  del app, what, name, skip, options
  return True if type(of).__name__ == "_tuplegetter" else None


class LinkNames(sphinx.transforms.SphinxTransform):
  """Makes each `js.name` a link to the reference; with `nitpicky` a name that is not there is a warning."""

  default_priority = 500

  def apply(self, **_: Any) -> None:
    """Replaces the literals of one document."""
    for literal in list(self.document.findall(docutils.nodes.literal)):
      inside = isinstance(
        literal.parent, sphinx.addnodes.pending_xref | docutils.nodes.reference
      )
      if inside or not (match := _NAME.fullmatch(literal.astext())):
        continue
      target = f"jaxsparse.{match[1]}"
      where = {
        "refdomain": "py",
        "reftype": "obj",
        "refdoc": self.env.docname,
        "refexplicit": True,
      }
      link = sphinx.addnodes.pending_xref("", reftarget=target, refwarn=True, **where)
      literal.replace_self(link)
      link += literal


def _check_coverage(app: sphinx.application.Sphinx, env: Any) -> None:
  del app
  documented = env.domains["py"].objects
  for name in js.__all__:
    if f"jaxsparse.{name}" not in documented:
      _log.warning("jaxsparse.%s is public and not in the reference", name)
  for package in PUBLIC:
    module = importlib.import_module(f"jaxsparse.{package}")
    for name in module.__all__:
      again = getattr(js, name, None) is getattr(module, name)  # documented as js.NAME
      if f"jaxsparse.{package}.{name}" not in documented and not (
        again and name in js.__all__
      ):
        _log.warning(
          "jaxsparse.%s.%s is public and not in the reference", package, name
        )

"""Diffs of docs/how_to/trainers.md, applied to the code of a trainer."""

MARK = "..."  # between two places of a diff


def changed(code, diff):
  """What a diff makes of `code`; each of its places must be there once."""
  for place in diff.split(f"{MARK}\n"):
    before, after = (
      "".join(f"{line[1:]}\n" for line in place.splitlines() if not line.startswith(sign)) for sign in "+-"
    )
    assert code.count(before) == 1, before
    code = code.replace(before, after)
  return code


def lines_changed(diff):
  """The number of lines that a diff adds and removes, but for empty ones."""
  return tuple(sum(line.startswith(sign) and line != sign for line in diff.splitlines()) for sign in "+-")

"""Diffs of docs/how_to/trainers.md, applied to the code of a trainer."""

import re


def changed(code, diff):
  """What a diff makes of `code`; each of its places, between lines of `...`, must be there once."""
  for place in diff.split("...\n"):
    before, after = _sides(place)
    assert code.count(before) == 1, before
    code = code.replace(before, after)
  return code


def files_changed(folder, diff):
  """{path: its code} of the files below `folder` that a diff changes; each place begins with `@@ PATH:LINE`."""
  codes = {}
  for path, line, place in re.findall(
    r"^@@ (\S+):(\d+)\n((?:(?!@@).*\n)*)", diff, re.MULTILINE
  ):
    whole = (folder / path).read_text()
    assert "".join(whole.splitlines(keepends=True)[int(line) - 1 :]).startswith(
      _sides(place)[0]
    ), f"{path}:{line}"
    codes[path] = changed(codes.get(path, whole), place)
  return codes


def lines_changed(diff):
  """The number of lines that a diff adds and removes, but for empty ones."""
  return tuple(
    sum(line.startswith(sign) and line != sign for line in diff.splitlines())
    for sign in "+-"
  )


def _sides(place):
  """The code before and after."""
  kept = lambda sign: "".join(
    f"{line[1:]}\n" for line in place.splitlines() if not line.startswith(sign)
  )
  return kept("+"), kept("-")

"""Marked tables of the pages are those of the kept results, and a page has or links every kept result."""

import json
import re

import pytest

from benchmarks import tables

PAGES = {path: path.read_text() for path in tables.pages()}
MARKS = [
  mark.split()
  for page in PAGES.values()
  for mark in re.findall(r"^<!-- table: (.+?) -->", page, re.MULTILINE)
]


def test_pages_have_the_numbers_of_the_results(subtests):
  for path, page in PAGES.items():
    with subtests.test(page=str(path.relative_to(tables.ROOT))):
      assert page == tables.fill(page), "make tables fills it"


def test_a_page_has_or_links_every_result():
  linked = {
    name
    for page in PAGES.values()
    for name in re.findall(r"\]\(\S*results/(\w+)\.json\)", page)
  }
  named = linked | {word.removeprefix("paces=") for mark in MARKS for word in mark}
  kept = [
    name
    for path in (tables.RESULTS / "tables").glob("*.json")
    for name in json.loads(path.read_text())
  ]
  assert len(set(kept)) == len(kept) > 20
  assert set(kept) <= named
  commands = json.loads((tables.RESULTS / "commands.json").read_text())
  files = {path.name for path in tables.RESULTS.iterdir() if path.suffix != ".png"}
  assert set(commands) == files - {"commands.json", "tables"}
  races = {
    path.stem
    for path in tables.RESULTS.glob("*.json")
    if "curves" in json.loads(path.read_text())
  }
  assert races <= named


def test_a_mark_is_replaced_and_all_else_stays(monkeypatch):
  monkeypatch.setitem(
    tables.TABLES,
    "words",
    lambda *words: tables.markdown(words, [["a", "1.5"], ["b", "> 2"]]),
  )
  before = (
    "`<!-- table: nothing -->`\n    <!-- table: an example -->\n    <!-- end -->\n"
  )
  made = "| x | y |\n| --- | --: |\n| a | 1.5 |\n| b | > 2 |"
  page = f"{before}<!-- table: words x y -->\n\n{made}\n\n<!-- end -->\nafter"
  assert tables.fill(page.replace(made, "old")) == page
  assert tables.fill(page) == page


@pytest.mark.parametrize(
  ("mark", "message"),
  [
    (
      "nothing",
      "<!-- table: nothing -->: no table 'nothing', choose one of kept, race",
    ),
    ("kept nothing", "no kept table 'nothing', choose one of "),
    ("papers BERT", "paper 'BERT', choose one of SparDL, Ok-Topk"),
  ],
)
def test_unknown_names_are_refused(mark, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    tables.fill(f"<!-- table: {mark} -->\n<!-- end -->")

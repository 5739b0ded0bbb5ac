"""What a reader of published weights copies, and the goals that are printed."""

from benchmarks.weights import reader, report
from jaxsparse.weights import files


def names(kind, *numbers):
  return [files.Name(number, 1, 0, 1, kind) for number in numbers]


def test_a_reader_copies_links_or_else_an_anchor_and_the_links_behind_it():
  links = names("link", 4, 5, 6, 7)
  there = sorted([*names("anchor", 3, 6), *links])
  (newest,) = names("anchor", 6)
  assert reader.needed(there, 4) == links[1:]
  assert reader.needed(there, 7) == []
  for version in (0, 2):
    assert reader.needed(there, version) == [newest, links[3]]
  # A link is lost behind the version that the reader has.
  there.remove(links[1])
  assert reader.needed(there, 4) == [newest, links[3]]
  assert reader.needed([], 4) == []


def test_a_goal_that_one_rate_misses_is_told():
  row = report.Row(1e-6, 1000, 4, 9.4, 9.9, 2.0, 6, 2000, 12, 10, *[1.0] * 8)
  other = row._replace(rate=1e-5, index_bits=7.0, diff_jit=5.0)
  missed = [goal.what for goal in report.goals([row, other]) if goal.met is False]
  assert missed == [
    "bits of an index at a rate of 1e-06 <= 9.5",
    "find, jitted: reads of the weights <= 4",
  ]

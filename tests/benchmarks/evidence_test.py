"""The evidence in the library is what the kept races show."""

from benchmarks import evidence


def test_the_file_of_the_library_is_that_of_the_results():
  """After a race's results changed: python -m benchmarks.evidence."""
  assert evidence.WRITTEN.read_text() == evidence.text()

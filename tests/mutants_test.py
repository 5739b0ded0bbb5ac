"""The defects of mutants.toml are in step with the package; `python -m tests.mutants` runs the tests that find them."""

import ast
import re

from tests.mutants import ROOT, read_mutants


def test_each_defect_can_be_made_and_names_tests_that_exist(subtests):
  for mutant in read_mutants():
    with subtests.test(f"{mutant.file}: {mutant.what}"):
      assert mutant.old != mutant.new
      ast.parse(mutant.text())  # raises unless the old text is there once
      assert mutant.tests
      for test in mutant.tests:
        path, _, function = test.partition("::")
        assert (ROOT / path).exists()
        name = function.partition("[")[0]
        assert not name or re.search(
          rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE
        )

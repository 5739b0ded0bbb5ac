"""Rare garbage collection, in the test process and in its child processes, where Python imports this file first.

Imports and compiled programs are millions of objects that stay, and each full
collection reads all of them: a tenth of the time of the tests, a third of that of a
short program, which collects once more at its end.
"""

import atexit
import gc
import os
import pathlib
import runpy

gc.set_threshold(100_000, 50, 100)
atexit.register(gc.freeze)

# A run that notes which code the tests reach (tests/reach.py).
if "JAXSPARSE_REACHED" in os.environ:
  runpy.run_path(str(pathlib.Path(__file__).with_name("reached.py")))["install"]()

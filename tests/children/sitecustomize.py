"""What Python imports first in child processes of the tests: a third of a short program's time is garbage collection.

Imports make millions of objects that stay: each full collection reads all of them, and so does the one at the end.
"""

import atexit
import gc

gc.set_threshold(100_000, 50, 100)
atexit.register(gc.freeze)

"""What makes JAX compile quickly, in the test process and in its child processes.

Most of the time of these tests is compilation. XLA's older emitter, in one piece, takes
a third of the time that the default takes, optimized machine code twice as long: tests
of the bits that users get compile with `cases.AS_USERS`.
"""

import os

import jax

_EMITTER = (
  "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)
# XLA ends the process at an unknown flag.
XLA_FLAGS = f"{os.environ.get('XLA_FLAGS', '')} {_EMITTER if jax.__version_info__ < (0, 11) else ''}".strip()

ENVIRONMENT = {"XLA_FLAGS": XLA_FLAGS, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}

"""Sixteen workers in every test process, strict arithmetic, and one table of collectives for all tests."""

import hypothesis
import jax

jax.config.update("jax_num_cpu_devices", 16)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Every example compiles a program: few of them, and no clock.
hypothesis.settings.register_profile("jaxsparse", deadline=None, max_examples=25, print_blob=True)
hypothesis.settings.load_profile("jaxsparse")

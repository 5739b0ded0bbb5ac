"""What compilers are told of a program whose collectives are to stay as they are; per program, never global."""

_GPU = {
  "xla_gpu_all_reduce_combine_threshold_bytes": 0,
  "xla_gpu_all_gather_combine_threshold_bytes": 0,
  "xla_gpu_collective_permute_combine_threshold_bytes": 0,
  "xla_gpu_enable_latency_hiding_scheduler": True,
  # How many collectives may be under way at once. What the data allows is what the plan does, so no limit beside it.
  "xla_gpu_experimental_parallel_collective_overlap_limit": 64,
}
_OPTIONS: dict[str, dict[str, str | bool | int]] = {
  "cpu": {"xla_disable_hlo_passes": "cpu-all-reduce-combiner"},
  "gpu": dict(_GPU),
  "cuda": dict(_GPU),
  "rocm": dict(_GPU),
  "tpu": {},
}


def compiler_options(platform: str) -> dict[str, str | bool | int]:
  """Options of `jax.jit` by which no two collectives of a program are merged, and by which they run beside backward.

  On CPU the pass is left out that merges all-reduces which do not depend on each other. On GPU nothing is merged
  (thresholds of 0), the latency-hiding scheduler moves the start of each collective up to where its gradient is made
  and its end down to where its total is read (collectives are asynchronous by default; leave
  `xla_gpu_disable_async_collectives` alone), and as many run at once as the data allows. What was tried was the CPU:
  XLA's runtime there runs one collective at a time, and hides little of it.

  Args:
    platform: "cpu", "gpu" (also called "cuda" or "rocm"), or "tpu", for which nothing is known to be needed.

  Raises:
    ValueError: for another platform.

  Example:
    >>> import jax, jaxsparse as js
    >>> step = jax.jit(lambda x: x + 1, compiler_options=js.overlap.compiler_options("cpu"))
    >>> float(step(1.0))
    2.0
  """
  if platform not in _OPTIONS:
    raise ValueError(f"compiler_options: platform={platform!r}, choose one of {', '.join(map(repr, _OPTIONS))}")
  return dict(_OPTIONS[platform])

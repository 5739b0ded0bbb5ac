"""Compiler options of programs that overlap collectives with backward; per program, no global flags."""

_GPU = {
  "xla_gpu_all_reduce_combine_threshold_bytes": 0,
  "xla_gpu_all_gather_combine_threshold_bytes": 0,
  "xla_gpu_collective_permute_combine_threshold_bytes": 0,
  "xla_gpu_enable_latency_hiding_scheduler": True,
  # Collectives in flight at once. The plan limits them by data dependencies; this
  # number is larger than it needs.
  "xla_gpu_experimental_parallel_collective_overlap_limit": 64,
}
# This pass would send all gradients at once, after the last one.
_CPU = {"xla_disable_hlo_passes": "cpu-all-reduce-combiner"}
_OPTIONS: dict[str, dict] = {
  "cpu": _CPU,
  "gpu": _GPU,
  "cuda": _GPU,
  "rocm": _GPU,
  "tpu": {},
}


def compiler_options(platform: str) -> dict[str, str | bool | int]:
  """Options of `jax.jit` that keep XLA from merging collectives and let them run while backward computes.

  On CPU the options disable the pass that merges independent all-reduces. On GPU they
  disable merging by thresholds of 0, enable the latency-hiding scheduler, which starts
  each collective as soon as its gradient is computed and waits for it where its total
  is read, and let all collectives that the data dependencies allow run at once.
  Collectives on GPU are asynchronous unless `xla_gpu_disable_async_collectives` is set.
  Overlap was measured on CPU only, where XLA's runtime runs one collective at a time
  and hides little of it.

  Args:
    platform: "cpu", "gpu" (also called "cuda" or "rocm"), or "tpu", which gets no
      options.

  Raises:
    ValueError: for another platform.

  Example:
    >>> import jax, jaxsparse as js
    >>> step = jax.jit(lambda x: x + 1, compiler_options=js.overlap.compiler_options("cpu"))
    >>> float(step(1.0))
    2.0
  """
  if platform not in _OPTIONS:
    raise ValueError(
      f"compiler_options: platform={platform!r}, choose one of {', '.join(map(repr, _OPTIONS))}"
    )
  return dict(_OPTIONS[platform])

"""Vectors on which samples mislead, and of which magnitudes tie or are not numbers."""

import numpy as np

N = 70_001
normal = np.random.default_rng(0).standard_normal(N).astype(np.float32)
GRADIENTS = {
  "normal": normal,
  "heavy tail": np.random.default_rng(1).standard_t(1.5, N).astype(np.float32),
  "sorted": np.sort(normal),
  "falling": -np.sort(-np.abs(normal)),
  "equal": np.full(N, -2.0, np.float32),
  "zeros": np.zeros(N, np.float32),
  "few values": np.round(normal),
  "mostly zeros": np.where(normal > 3, normal, 0).astype(np.float32),
  "one giant": np.where(np.arange(N) == 777, 1e30, normal).astype(np.float32),
  "periodic": np.where(np.arange(N) % 64 == 0, 5.0, normal).astype(np.float32),
  "a crowd at the end": np.where(np.arange(N) >= N - 900, 9.0, normal).astype(
    np.float32
  ),
  "not finite": np.where(
    np.arange(N) % 5000 == 1,
    np.nan,
    np.where(np.arange(N) % 7000 == 1, -np.inf, normal),
  ).astype(np.float32),
  "denormal": (normal * 1e-40).astype(np.float32),
}


def keys_in_numpy(x):
  """The bits of magnitudes as integers; the same for every NaN."""
  return np.minimum(
    np.ascontiguousarray(x, np.float32).view(np.int32) & 0x7FFF_FFFF, 0x7F80_0001
  )


def simple(x, k):
  """The indices of the k largest by a stable sort, ascending."""
  return np.sort(np.argsort(-keys_in_numpy(x), kind="stable")[:k])

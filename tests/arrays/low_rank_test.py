"""Vectors of low-rank matrices: the form for accelerators against that for CPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.arrays import low_rank
from tests.cases import normals


def test_on_cpu_the_residual_is_written_with_seven_passes_over_it():
  """Parts of it that a conditional is given would be copied: two passes, and half as much time of an update more."""
  shapes = [(576, 64), (4608, 512), (2304, 256)]
  array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  pieces = [(array(4, a), array(4, b)) for a, b in shapes]
  n = sum(a * b for a, b in shapes)
  finite = jax.ShapeDtypeStruct((), jnp.bool_)
  subtract = jax.jit(low_rank.subtract, donate_argnums=2, static_argnums=4)
  with js.traced_for("cpu"):
    lowered = subtract.lower(pieces, array(n), array(n), finite, 0.5)
  assert lowered.compile().cost_analysis()["bytes accessed"] < 7.2 * 4 * n


@pytest.mark.parametrize("finite", [True, False])
def test_every_platform_writes_the_same(finite):
  piece = lambda a, b: (jnp.asarray(normals(a, 3, a)), jnp.asarray(normals(b, 3, b)))
  x = [piece(5, 8), jnp.arange(4.0), piece(6, 2)]
  grads, residual = jnp.asarray(normals(0, 2, 56))
  entries = np.concatenate(
    [np.asarray(p[0].T @ p[1]).ravel() if isinstance(p, tuple) else p for p in x]
  )
  expected = [
    entries * finite,
    0.5 * (grads + residual - entries) if finite else residual,
  ]

  def both(x):
    keep = jnp.bool_(finite)
    return low_rank.dense_if(keep, x), low_rank.subtract(
      x, grads, residual, keep, decay=0.5
    )

  for platform in ("cpu", "cuda", "tpu"):
    with js.traced_for(platform):
      found = jax.jit(both)(x)
    for one, other in zip(found, expected, strict=True):
      np.testing.assert_allclose(one, other, atol=1e-5)

"""DctTopk and DeMo against scipy: cosine transforms of tiles of any shape, and the training step built on them."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.fft

import jaxsparse as js
from jaxsparse.collectives.baselines.dcttopk.tiling import Tiling
from tests.cases import bits, mesh_of, normals, quick_of

SHAPES = {
  "matrix": (8, 12),
  "prime": (7, 5),
  "scalar": (),
  "stacked": (3, 5, 4),
  "vector": (11,),
}
VECTORS = {"a": (9,), "b": (131,)}  # the tiles of most entries have one size
SIDE = 4


def all_tiles(shapes, side):
  """Index arrays of the tiles of all leaves, in the order of their coefficients: by decreasing size."""
  found, start = [], 0
  for shape in shapes:
    matrix = start + np.arange(int(np.prod(shape))).reshape(
      -1, shape[-1] if shape else 1
    )
    corners = itertools.product(
      range(0, matrix.shape[0], side), range(0, matrix.shape[1], side)
    )
    found += [matrix[top : top + side, left : left + side] for top, left in corners]
    start += matrix.size
  return sorted(found, key=lambda tile: (-tile.size, len(tile)))


def transformed(flat, shapes, side, transform):
  """The coefficients of f64[n], or with `idctn` the entries of coefficients."""
  out, start = np.zeros_like(flat), 0
  for tile in all_tiles(shapes, side):
    there = slice(start, start + tile.size)
    if transform is scipy.fft.dctn:
      out[there] = transform(flat[tile], norm="ortho").ravel()
    else:
      out[tile] = transform(flat[there].reshape(tile.shape), norm="ortho")
    start += tile.size
  return out


def sent_in_scipy(acc, shapes, side, k):
  """The coefficients that one worker sends, f64[n]: the k largest of each chunk of side² coefficients."""
  coefficients = transformed(acc, shapes, side, scipy.fft.dctn)
  sent = np.zeros_like(coefficients)
  for start in range(0, acc.size, side**2):
    chosen = (
      start
      + np.argsort(-np.abs(coefficients[start : start + side**2]), kind="stable")[:k]
    )
    sent[chosen] = coefficients[chosen]
  return sent


@pytest.mark.parametrize("side", quick_of([1, 4, 64], quick=[4]))
def test_coefficients_and_their_inverse_in_scipy(side):
  """Leaves of prime lengths, of one axis, of three, and a scalar; one alone has the bits of many together."""
  shapes = tuple(SHAPES.values())
  n = sum(int(np.prod(shape)) for shape in shapes)
  tiling, rows = Tiling(shapes, side), normals(0, 3, n)
  there = jax.jit(jax.vmap(tiling.coefficients))(rows)
  back = jax.jit(jax.vmap(tiling.entries))(there)
  for row, found, again in zip(rows, there, back, strict=True):
    expected = transformed(row.astype(np.float64), shapes, side, scipy.fft.dctn)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(again, row, atol=1e-5)
  np.testing.assert_array_equal(
    bits(jax.jit(tiling.coefficients)(rows[1])), bits(there[1])
  )
  np.testing.assert_array_equal(bits(jax.jit(tiling.entries)(there[1])), bits(back[1]))


@pytest.mark.parametrize(
  "combine", quick_of(["workers", "contributors"], quick=["workers"])
)
def test_demo_in_scipy(combine):
  """Three steps of three workers on a mesh: home = β r + g, the sign of what is delivered, and what is kept."""
  workers, k, rate, decay, shapes = 3, 2, 0.1, 0.9, tuple(SHAPES.values())
  params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
  n = sum(leaf.size for leaf in jax.tree.leaves(params))
  tx = js.demo_transform(
    "workers",
    learning_rate=rate,
    density=k / SIDE**2,
    decay=decay,
    chunk=SIDE**2,
    combine=combine,
  )
  loss = lambda p, batch: jnp.vdot(jax.flatten_util.ravel_pytree(p)[0], batch[0])
  step, state = (
    js.make_train_step(loss, tx, mesh_of(workers), donate=False),
    js.init(tx, params, mesh_of(workers)),
  )
  kept, theta = np.zeros((workers, n)), np.zeros(n)
  inverse = functools.partial(
    transformed, shapes=shapes, side=SIDE, transform=scipy.fft.idctn
  )
  for number in range(3):
    grads = normals(number, workers, n)
    params, state, _ = step(params, state, grads)
    home = grads + kept
    sent = np.array([sent_in_scipy(row, shapes, SIDE, k) for row in home])
    total = sent.sum(0) / (
      1 if combine == "workers" else np.maximum(np.count_nonzero(sent, axis=0), 1)
    )
    update = inverse(total)
    clear = np.abs(update) > 1e-5  # the sign of a rounding error is no law
    found = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)])
    np.testing.assert_allclose(
      (found - theta)[clear], -rate * np.sign(update)[clear], atol=1e-6
    )
    assert clear.mean() > 0.9
    theta = found
    kept = decay * (home - np.array([inverse(row) for row in sent]))
    np.testing.assert_allclose(
      np.reshape(state[0].carried.residual[0], (workers, n)), kept, atol=1e-5
    )
  step.check(params, state)


@pytest.mark.parametrize(
  "shapes",
  quick_of([SHAPES, VECTORS, {"matrix": (40, 24)}], quick=[VECTORS]),
  ids=["many", "vectors", "matrix"],
)
def test_the_way_of_gpus_has_the_same_bits(shapes):
  """Coefficients piece by piece, and both results in place; a skipped step between two others."""
  workers = 3

  def three_steps():
    results, state = [], None
    for number in range(3):
      grads = {name: normals(number, workers, *shape) for name, shape in shapes.items()}
      if number == 1:
        grads = jax.tree.map(
          lambda x: x.at[0].set(jnp.inf), jax.tree.map(jnp.asarray, grads)
        )
      out = js.simulate(
        "dcttopk", grads, state=state, density=0.2, decay=0.5, chunk=SIDE**2
      )
      state = out.state
      results += [out.total, out.residuals]
    return results

  expected = three_steps()
  with js.traced_for("cuda"):
    found = three_steps()
  jax.tree.map(
    lambda one, other: np.testing.assert_array_equal(bits(one), bits(other)),
    found,
    expected,
  )


@pytest.mark.parametrize("chunk", [10, 2**13])
def test_a_chunk_that_is_no_tile(chunk):
  with pytest.raises(
    ValueError,
    match=f"dcttopk: chunk={chunk}, choose a square number, 4096 for tiles of 64 × 64",
  ):
    js.demo_transform("workers", chunk=chunk)

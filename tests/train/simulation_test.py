"""The simulator's own promises."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.transform.factories import transform_function
from tests.cases import assert_same_bits, normals

ZEROS = np.zeros((2, 4), np.float32)


def test_a_collective_of_your_own():
  """It has the name of its module."""

  class Doubled(type(js.make_collective("dense"))):
    def reduce(self, comm, grads, state):
      return super().reduce(comm, 2 * grads, state)

  np.testing.assert_array_equal(
    js.simulate(Doubled(), jnp.ones((3, 4))).total, np.full(4, 6.0)
  )
  assert js.costs.count(Doubled(), n=12, workers=3, dtype="bfloat16") == js.costs.count(
    "dense", n=12, workers=3, dtype="bfloat16"
  )
  assert Doubled().name == __name__.rpartition(".")[2]
  assert transform_function(Doubled).__name__ == f"{Doubled().name}_transform"
  with pytest.raises(TypeError, match="unknown option density, choose from dtype"):
    js.simulate(Doubled(), jnp.ones((3, 4)), density=0.1)


def test_contraction_is_what_the_steps_leave_out():
  """Compared with TopkA in numpy; dense leaves nothing out, and of gradients of 0 nothing is divided by 0."""
  steps, workers, n, k = 4, 3, 40, 6
  grads = normals(0, steps, workers, n)
  left = np.zeros((workers, n), np.float32)
  found = js.costs.contraction(
    "topka", {"a": grads[..., :10], "b": grads[..., 10:]}, k=k
  )
  largest = lambda row: np.where(np.abs(row) >= np.sort(np.abs(row))[-k], row, 0)
  for step, own in enumerate(grads):
    acc = own + left
    sent = np.array([largest(row) for row in acc])
    mean, delivered, left = acc.mean(0), sent.mean(0), acc - sent
    np.testing.assert_allclose(
      found.left_out[step], ((mean - delivered) ** 2).sum() / (mean**2).sum(), rtol=1e-5
    )
    xi = np.linalg.norm(largest(mean) - delivered) / np.linalg.norm(own.mean(0))
    np.testing.assert_allclose(found.xi[step], xi, rtol=1e-5)
  dense = js.costs.contraction("dense", np.concatenate([grads, 0 * grads]))
  np.testing.assert_allclose(dense, np.zeros((2, 2 * steps)), atol=1e-6)
  with pytest.raises(ValueError, match=r"shape \(40,\), give \[workers, entries\]"):
    js.costs.contraction("topka", left, k=k)


@pytest.mark.parametrize(
  ("name", "given", "options", "error", "message"),
  [
    (
      "topka",
      [ZEROS[0]],
      {"k": 1},
      ValueError,
      r"shape \(4,\), give \[workers, entries\]",
    ),
    ("topka", [ZEROS[:0]], {"k": 1}, ValueError, r"shape \(0, 4\)"),
    ("topka", [ZEROS.astype(np.int32)], {"k": 1}, TypeError, "dtype int32"),
    ("topka", [ZEROS, ZEROS[:, :3]], {"k": 1}, ValueError, r"shapes .*\(2, 3\)"),
    ("dense", [ZEROS, ZEROS], {}, ValueError, "dense keeps no residual"),
    (
      "topka",
      [ZEROS],
      {"k": 5},
      ValueError,
      "at most the number of gradient entries, 4",
    ),
    (
      "topka",
      [np.zeros((3, 4), np.float32)],
      {"k": 1, "state": ZEROS},
      ValueError,
      "2 workers, the axis has 3",
    ),
    (
      "topka",
      [np.zeros((2, 5), np.float32)],
      {"k": 1, "state": ZEROS},
      ValueError,
      "not one of topka .* 5 entries",
    ),
    (
      "topka",
      [ZEROS, ZEROS],
      {"k": 1, "state": ZEROS},
      ValueError,
      "residuals or state, not both",
    ),
  ],
)
def test_bad_input(name, given, options, error, message):
  if "state" in options:  # after these gradients
    options = options | {"state": js.simulate(name, options["state"], k=1).state}
  with pytest.raises(error, match=message):
    js.simulate(name, *given, **options)


def test_a_pytree_and_a_loop_of_steps_by_state_or_residuals():
  grads = {"w": normals(0, 3, 4, 2), "b": normals(1, 3, 2)}
  flat = np.concatenate([grads["b"], grads["w"].reshape(3, -1)], axis=1)
  run = functools.partial(js.simulate, "topka", k=3)
  one, other = run(grads), run(flat)
  assert_same_bits(
    one.total, {"b": other.total[:2], "w": other.total[2:].reshape(4, 2)}
  )
  assert_same_bits(one.residuals["w"], other.residuals[:, 2:].reshape(3, 4, 2))
  again, flat_again = (
    run(grads, residuals=one.residuals),
    run(flat, residuals=other.residuals),
  )
  assert_same_bits(again.total["w"], flat_again.total[2:].reshape(4, 2))
  by_state = run(grads, state=one.state)
  assert_same_bits((by_state.total, by_state.residuals), (again.total, again.residuals))
  with pytest.raises(
    ValueError, match=r"grads\['w'\] has shape \(2, 4, 2\), .* 3 workers"
  ):
    run(grads | {"w": normals(0, 2, 4, 2)})

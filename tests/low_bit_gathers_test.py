"""All-gather and reduce-scatter in a few bits: against numpy, their gradients, messages, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxsparse as js
from tests.cases import assert_same_bits, mesh_of, normals, quick_of
from tests.reference.rounding import blocks_of, rounded


def on_mesh(function, workers, *arrays, checked=True):
  """Results of all workers, [P, …] each, of the rows of the arrays, [P, …] too."""
  program = lambda *rows: function(*(row[0] for row in rows))[None]
  specs = (P("workers"),) * len(arrays)
  mapped = jax.shard_map(
    program,
    mesh=mesh_of(workers),
    in_specs=specs,
    out_specs=P("workers"),
    check_vma=checked,
  )
  return np.asarray(jax.jit(mapped)(*map(jnp.asarray, arrays)))


def in_numpy(part, bits):
  """Q of a part, in float64."""
  flat = part.reshape(-1).astype(np.float64)
  blocks, columns, _ = blocks_of(flat.size, 1, bits)
  return rounded(flat, blocks, columns, bits).reshape(part.shape)


CASES = [
  (8, 3, (4, 33), 0),
  (4, 2, (70, 130), 1),
  (2, 4, (3, 5, 8), -2),
  (8, 6, (1,), 0),
  (4, 1, (9,), 0),
]


@pytest.mark.parametrize(
  ("bits", "workers", "shape", "dimension"), quick_of(CASES, quick=CASES[:1])
)
def test_equal_the_formulas_in_numpy(bits, workers, shape, dimension):
  parts = normals(0, workers, int(np.prod(shape))).reshape(workers, *shape)
  gather = functools.partial(
    js.all_gather, axis="workers", bits=bits, dimension=dimension
  )
  scatter = functools.partial(
    js.psum_scatter, axis="workers", bits=bits, dimension=dimension
  )
  gathered = on_mesh(gather, workers, parts)
  assert_same_bits(gathered, np.broadcast_to(gathered[0], gathered.shape))
  rounded_parts = np.concatenate([in_numpy(part, bits) for part in parts], dimension)
  # An entry on the boundary of two steps may go either way.
  assert np.mean(np.abs(gathered[0] - rounded_parts) > 1e-5) <= 2e-3
  terms = normals(1, workers, gathered[0].size).reshape(gathered.shape)
  scattered = on_mesh(scatter, workers, terms)
  for owner in range(workers):
    each = [np.split(term, workers, dimension)[owner] for term in terms]
    total = sum(
      part if worker == owner else in_numpy(part, bits)
      for worker, part in enumerate(each)
    )
    assert np.mean(np.abs(scattered[owner] - total) > 1e-5) <= 2e-3


@pytest.mark.parametrize("checked", quick_of([True, False], quick=[True]))
def test_each_is_the_gradient_of_the_other_on_a_mesh_and_in_the_simulator(checked):
  workers, bits = 3, 4
  parts = normals(0, workers, 40)
  terms = normals(1, workers, 120)
  gathered = lambda part, term: jnp.vdot(
    js.all_gather(part, "workers", bits=bits), term
  )
  scattered = lambda term, part: jnp.vdot(
    js.psum_scatter(term, "workers", bits=bits), part
  )
  of_parts = on_mesh(jax.grad(gathered), workers, parts, terms, checked=checked)
  of_terms = on_mesh(jax.grad(scattered), workers, terms, parts, checked=checked)
  simulated = lambda function: jax.vmap(
    lambda row: function(row, js.SimComm("w"), bits=bits), axis_name="w"
  )
  assert_same_bits(of_parts, simulated(js.psum_scatter)(terms))
  assert_same_bits(of_terms, simulated(js.all_gather)(parts))


def test_terms_are_added_in_the_order_of_workers_and_dtypes_stay():
  """Magnitudes that float32 adds up to different sums in different orders; one entry a worker is never rounded."""
  terms = np.array([[2.0**24], [1.0], [1.0]], np.float32).repeat(3, 1)
  scatter = jax.vmap(
    lambda x: js.psum_scatter(x, js.SimComm("w"), bits=8), axis_name="w"
  )
  sent = [float(in_numpy(term[:1], 8)[0]) for term in terms]
  for owner, total in enumerate(np.asarray(scatter(jnp.asarray(terms)))):
    each = [
      np.float32(term[0] if worker == owner else sent[worker])
      for worker, term in enumerate(terms)
    ]
    assert total == (each[0] + each[1]) + each[2]
  assert scatter(jnp.asarray(terms, jnp.bfloat16)).dtype == jnp.bfloat16


def test_messages_have_the_words_of_so_many_bits():
  workers, size = 4, 32 * 1000
  mesh = mesh_of(workers)
  for function, given in ((js.all_gather, size // workers), (js.psum_scatter, size)):
    send = functools.partial(function, axis="workers", bits=8)
    program = jax.shard_map(
      send, mesh=mesh, in_specs=P("workers"), out_specs=P("workers")
    )
    lowered = jax.jit(program).lower(
      jax.ShapeDtypeStruct((workers * given,), jnp.float32)
    )
    sent = js.costs.audit(lowered, mesh).bytes
    least = (workers - 1) * size // workers  # a byte an entry
    assert least < sent < 1.03 * least


def test_zeros_stay_and_what_is_not_finite_shows_at_every_worker():
  parts = jnp.zeros((3, 70)).at[1, 5].set(jnp.nan)
  gather = jax.vmap(lambda x: js.all_gather(x, js.SimComm("w")), axis_name="w")
  gathered = np.asarray(gather(parts)).reshape(3, 3, 70)
  assert np.isnan(gathered[:, 1, 5]).all()
  np.testing.assert_array_equal(gathered[:, [0, 2]], 0)


@pytest.mark.parametrize("function", [js.all_gather, js.psum_scatter])
@pytest.mark.parametrize(
  ("x", "options", "error", "message"),
  [
    (jnp.zeros(6), {"bits": 16}, ValueError, "bits=16, choose one of 2, 4 and 8"),
    (jnp.zeros(6), {"dimension": 1}, ValueError, "dimension=1, x has 1 dimensions"),
    (jnp.zeros(6, jnp.int32), {}, TypeError, "entries are int32, give floating ones"),
    (jnp.zeros(()), {}, ValueError, "dimension=0, x has 0 dimensions"),
  ],
)
def test_what_is_refused(function, x, options, error, message):
  with pytest.raises(error, match=f"{function.__name__}: {message}"):
    function(x, js.comm.SoloComm(3), **options)


def test_a_dimension_that_workers_do_not_divide_is_refused():
  with pytest.raises(
    ValueError,
    match=r"psum_scatter: 3 workers do not divide dimension 1 of \(6, 4\): pad it",
  ):
    js.psum_scatter(jnp.zeros((6, 4)), js.comm.SoloComm(3), dimension=1)


@pytest.mark.parametrize("dimension", [0, 1])
def test_an_array_without_entries_is_sent_in_no_message(dimension):
  """Also its gradient."""
  shape = lambda length: (2, 0, length) if dimension else (2, length, 0)
  comm, x = js.SimComm("workers"), jnp.zeros(shape(6))
  mapped = lambda function: jax.vmap(
    lambda row: function(row, comm, dimension=dimension), axis_name="workers"
  )
  assert mapped(js.all_gather)(x).shape == shape(12)
  assert mapped(js.psum_scatter)(x).shape == shape(3)
  total = lambda row, *given, **named: js.all_gather(row, *given, **named).sum()
  assert mapped(jax.grad(total))(x).shape == x.shape

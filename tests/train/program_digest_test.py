"""The digest of a program: the same in every process, another one for another program."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsparse.comm.verbs import MESSAGE, rank_p
from jaxsparse.train.program_digest import program_digest

PROGRAMS = """
import functools
import jax, jax.numpy as jnp, numpy as np, optax
import jaxsparse as js
from jaxsparse.train.program_digest import program_digest

@jax.custom_vjp
def halved(x):
  return x

halved.defvjp(lambda x: (x, None), lambda _, g: (g / 2,))

@functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
def deep(x, w):
  return jax.nn.relu(jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w)[0])

def loss(params, x):
  named = {name: len(name) for name in {"one", "three", "seventeen"}}  # its order depends on the seed of hashes
  jax.debug.callback(lambda y: None, x.sum())
  x = jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
  x = jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x) + jax.random.normal(jax.random.key(3), x.shape)
  x = jax.lax.while_loop(lambda x: x.sum() < sum(named.values()), lambda x: x * 2 + 1, jax.lax.stop_gradient(x))
  return halved(deep(x, params["w"])).mean() + jax.lax.linalg.cholesky(jnp.eye(4) + params["w"][0]).sum()

params, batch = {"w": jnp.zeros((3, 4, 4))}, jnp.ones((2, 4))
print(program_digest(jax.make_jaxpr(jax.value_and_grad(loss))(params, batch)))
comm = js.SimComm("workers", members=2)
for transform in (js.spardl_transform, js.oktopk_transform):
  tx = optax.chain(transform(comm, density=0.5), optax.adam(0.1))
  step = js.make_train_step(lambda params, x: (params["w"] * x.mean()).sum(), tx, comm)
  program, _ = step._program(params, js.init(tx, params, comm), batch)
  traced = program.trace(params, js.init(tx, params, comm), batch)
  print(program_digest(traced.jaxpr))
"""


@pytest.mark.long
def test_processes_compute_the_same_digest():
  """With other seeds of hashes, at other addresses, of other paths."""
  runs = []
  for seed in (1, 2):
    environment = os.environ | {"PYTHONHASHSEED": str(seed), "JAX_PLATFORMS": "cpu"}
    code = "x = [object() for _ in range(10_000)]\n" * (seed - 1) + PROGRAMS
    runs.append(
      subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment
      )
    )
  first, second = (run.communicate(timeout=120)[0] for run in runs)
  assert first == second
  assert len(set(first.split())) == 3


TABLE = np.arange(4.0, dtype=np.float32)
BASE = {
  "rate": 0.1,
  "table": TABLE,
  "length": 3,
  "axis": 0,
  "name": "f",
  "shape": (4, 2),
}


def _digest(rate, table, length, axis, name, shape):
  def body(c, _):
    return c * rate, None

  body.__name__ = name

  def program(x):
    x = jax.lax.scan(body, x, length=length)[0]
    return jnp.sum(jax.jit(body)(x + table[: len(x), None], None)[0], axis)

  return program_digest(jax.make_jaxpr(program)(jnp.zeros(shape)))


@pytest.mark.parametrize(
  "change",
  [{"rate": 0.2}, {"table": TABLE + 1}, {"length": 4}, {"axis": 1}, {"shape": (3, 2)}],
  ids=lambda change: next(iter(change)),
)
def test_another_program_has_another_digest(change):
  same = _digest(**BASE | {"name": "g", "table": TABLE.copy()})
  assert _digest(**BASE) == same != _digest(**BASE | change)


def test_functions_among_parameters_are_known_by_their_names():
  def digest(name):
    policy = lambda *_, **__: False
    policy.__name__ = name
    program = jax.checkpoint(jnp.sin, policy=policy)
    return program_digest(jax.make_jaxpr(program)(1.0))

  assert digest("save_nothing") == digest("save_nothing") != digest("save_some")


def test_ranks_of_mpi_differ_in_their_number_and_in_whom_they_send_to():
  def digest(rank, kept, factor=1):
    send = functools.partial(
      lambda x, kept: x if kept else jnp.zeros_like(x), kept=kept
    )
    send.__name__ = MESSAGE
    program = lambda x: jax.jit(send)(x) * factor + rank_p.bind(jnp.float32(rank))
    return program_digest(jax.make_jaxpr(program)(1.0))

  assert digest(0, True) == digest(1, False) != digest(0, True, factor=2)

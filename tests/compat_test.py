"""The platform that programs are traced for."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxsparse as js
from jaxsparse import _compat
from tests.cases import mesh_of

WAYS = {"default": lambda x: x, "gpu": lambda x: x + 1, "tpu": lambda x: x + 2}


def chosen(x):
  return _compat.by_platform(**WAYS)(x)


def test_a_program_has_the_way_of_one_platform_or_of_all():
  text = lambda: str(jax.make_jaxpr(chosen)(1.0))
  assert "add" not in text()
  for platform, added in (("cuda", 1), ("rocm", 1), ("gpu", 1), ("tpu", 2), ("cpu", 0)):
    with js.traced_for(platform):
      # a program for each platform, not the one from before
      assert jax.jit(chosen)(1.0) == 1 + added
  with js.traced_for("any"):
    assert text().count("add") == 2  # CUDA and ROCm have the same
    assert jax.jit(chosen)(1.0) == 1


def test_the_platform_is_that_of_the_mesh_or_of_the_default_device(monkeypatch):
  monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
  assert _compat.by_platform(**WAYS)(0) == 2
  with jax.default_device(jax.devices()[0]):
    assert _compat.by_platform(**WAYS)(0) == 0
  with jax.default_device("gpu"):
    assert _compat.by_platform(**WAYS)(0) == 1
  mapped = jax.shard_map(
    chosen, mesh=mesh_of(2), in_specs=P("workers"), out_specs=P("workers")
  )
  assert mapped(jnp.zeros(2)).tolist() == [0, 0]


def test_other_platforms_are_refused():
  with pytest.raises(
    ValueError,
    match="platform='metal', choose one of 'cpu', 'gpu', 'cuda', 'rocm', 'tpu', 'any'",
  ):
    js.traced_for("metal")

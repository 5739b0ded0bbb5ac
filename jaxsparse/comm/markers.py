"""Primitives that mark values in a jaxpr and compute nothing."""

from jax.extend import core
from jax.interpreters import ad, batching, mlir


def _identity(name: str) -> core.Primitive:
  """A primitive that returns its operand and that every transformation of JAX keeps."""
  primitive = core.Primitive(name)
  primitive.def_impl(lambda x, **_: x)
  primitive.def_abstract_eval(lambda x, **_: x)
  mlir.register_lowering(primitive, lambda _, x, **__: [x])
  ad.deflinear2(primitive, lambda cotangent, *_, **__: [cotangent])
  batching.primitive_batchers[primitive] = lambda args, dims, **params: (primitive.bind(*args, **params), dims[0])
  return primitive


total_p = _identity("jaxsparse_total")  # equal on all workers of `axes`; None where the comm does not name its axes
rank_p = _identity("jaxsparse_rank")  # the number of a rank of MPI: the one number that ranks may trace differently
message_p = _identity("jaxsparse_message")  # a message of `SoloComm`, which sends nothing
MESSAGE = "jaxsparse_message"  # name of the jitted function that sends a message of MPI: each rank has its own partners

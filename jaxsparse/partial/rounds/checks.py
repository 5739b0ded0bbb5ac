"""Checks of what `Rounds` is given: options, an outer chain, and a saved state, sealed with a number and a digest."""

import contextlib
import threading
import zlib
from collections.abc import Callable
from numbers import Real
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec

from jaxsparse.arrays.flatten import leaves_by_name
from jaxsparse.collectives._base import check_whole
from jaxsparse.comm import replication
from jaxsparse.comm.peers import PEERS
from jaxsparse.transform import state as states
from jaxsparse.types import State, is_number

SavedState = dict[str, Any]  # arrays and numbers by name, as `Rounds.state` has them
_UNLIKE = (
  "no jaxsparse transform covers it (optax.masked passes masked leaves on unchanged), or it is computed from what one "
  "worker gives (by a transformation before the transform, or around it, as optax.apply_if_finite), or the totals of "
  "the collective differ (A2SGD). Give every leaf a transform, and begin the chain with it"
)
# specs of arrays that are equal on all workers of a round, and that differ
_ALIKE = PartitionSpec()
_OF_WORKER = PartitionSpec(PEERS)
MOST_WEIGHT = 2**31 - 1  # weight of a step
# all entries of a state but its digest, in its order: dtype, and how many dimensions
_SEALED = {
  "anchor": ("uint8", 1),
  "residual": ("float32", 1),
  "moved": ("float32", 1),
  "trained": ("int64", 2),
  "share": ("float64", 0),
  "latest": ("int64", 0),
  "fragments": ("int64", 0),
  "part": ("int64", 1),
  "names": ("int64", 0),
  "number": ("int64", 0),
  "run": ("int64", 0),
}
# entries with floating-point numbers, which have to be finite; all others have integers
_REAL = "residual", "moved", "share"
_ENTRIES = _SEALED | {"digest": ("int64", 0)}


def check_options(
  worker: int,
  every: int,
  fragments: int,
  delay: int,
  mixing: float | None,
  apply_residual: bool,
  link: bool,
  **seconds: float | None,
) -> None:
  """Raises ValueError for options outside the choices of `Rounds`; `seconds` has those that are times, or None."""
  # messages have 16 bits for the number of a worker
  check_whole("Rounds", 0, 2**16 - 1, number=worker)
  check_whole("Rounds", 1, every=every)
  check_whole("Rounds", 1, every, fragments=fragments)
  # An exchange ends before the next one begins, every // fragments steps later.
  check_whole("Rounds", 0, every // fragments - 1, delay=delay)
  if mixing is not None and not 0 <= mixing < 1:
    raise ValueError(f"Rounds: mixing={mixing!r}, choose 0 up to less than 1, or None")
  if apply_residual and mixing is not None:
    raise ValueError(
      f"Rounds: apply_residual={apply_residual!r} with mixing={mixing!r}, choose one of them"
    )
  if link and (apply_residual or mixing is not None):
    raise ValueError(
      f"Rounds: link=True with apply_residual={apply_residual!r}, mixing={mixing!r}: a link has neither"
    )
  for name, value in seconds.items():
    if value is not None and not (
      is_number(value, Real) and 0 <= value <= threading.TIMEOUT_MAX
    ):
      raise ValueError(
        f"Rounds: {name}={value!r}, choose seconds from 0 to {threading.TIMEOUT_MAX:g}"
      )


def read_weight(weight: Any) -> int:
  """The weight of a step, of a whole real scalar of Python, numpy or JAX: 32, 32.0, `mask.sum()`.

  Raises:
    ValueError: for anything else: a fraction, NaN, a flag, an array with a shape.
  """
  dtype = getattr(weight, "dtype", None)
  # A flag is no number of tokens, though Python counts True as 1.
  is_flag = isinstance(weight, bool) or dtype == np.bool_
  integer = -1  # refused below
  if not is_flag and np.shape(weight) == () and not np.iscomplexobj(weight):
    with contextlib.suppress(TypeError, ValueError, OverflowError):
      integer = int(weight)
  if not 0 <= integer <= MOST_WEIGHT or integer != weight:
    raise ValueError(
      f"step: weight={weight!r}, choose a whole number from 0 to {MOST_WEIGHT}"
    )
  return integer


def check_alike(step: Callable, outer: optax.OptState) -> Callable:
  """`step` with a check: tracing it raises ValueError if a result that must be equal on all workers may differ.

  Residuals and other parts of the state that are a worker's own may differ.

  Args:
    step: an outer step, (rank, weight, θ − θ_w, state of the outer chain, θ) ->
      (θ, state of the outer chain, whether it is skipped).
    outer: the state of the outer chain, for its structure.
  """
  # for the error: the likely mistake where a result is not alike
  results = dict.fromkeys(("anchor", "outer", "skipped"), _UNLIKE)
  inputs = _specs(outer)
  # `inputs[3]`: the spec of the outer chain's state
  outputs = _ALIKE, inputs[3], _ALIKE
  return replication.checked(step, inputs, outputs, PEERS, results)


def halve_step(step: Callable, operands: tuple) -> tuple[replication.Halves, Any]:
  """Splits an outer step in two programs; returns them, and the shapes and dtypes of the step's results.

  The first program sends all messages. The second one computes from their totals the
  results that are equal on all workers.

  Args:
    step: as in `check_alike`.
    operands: of the step, or their shapes and dtypes.
  """
  outer = operands[3]
  checked = check_alike(step, outer)
  closed, shapes = jax.make_jaxpr(checked, return_shape=True)(*operands)
  # for each input of the jaxpr: its spec, then the axes over which it varies
  specs = jax.tree.leaves(jax.tree.broadcast(_specs(outer), operands))
  varying = list(map(replication.axes_of_spec, specs))
  return replication.halve(closed, varying, PEERS), shapes


def _specs(outer: optax.OptState) -> tuple:
  """Partition specs of the operands of an outer step: `_OF_WORKER` for what differs between workers, else `_ALIKE`.

  Args:
    outer: the state of the outer chain, the fourth operand.
  """

  # Of a jaxsparse transform only `shared` has to be alike. In the order of the fields:
  # residual, `worker`, `shared`; then carried, counters, layout.
  def spec(leaf: Any) -> Any:
    if not states.is_reduce_state(leaf):
      return _ALIKE
    carried = State(_OF_WORKER, _OF_WORKER, shared=_ALIKE)
    return states.ReduceState._make((carried, _OF_WORKER, _OF_WORKER))

  state = jax.tree.map(spec, outer, is_leaf=states.is_reduce_state)
  # rank, weight, θ − θ_w, state of the outer chain, θ
  return (_OF_WORKER, _OF_WORKER, _OF_WORKER, state, _ALIKE)


def seal(state: SavedState, worker: int, run: int) -> SavedState:
  """`state` with the numbers of its worker and of the run, and a digest of all entries."""
  state = state | {"number": np.int64(worker), "run": np.int64(run)}
  return state | {"digest": np.int64(_digest(state))}


def hash_names(tree: optax.Params) -> int:
  """A hash of the names of all leaves, since those of another model may have equal shapes."""
  return zlib.crc32(repr([*leaves_by_name(tree)]).encode())


def check_state(
  state: SavedState,
  worker: int,
  fragments: int,
  where: tuple[int, int] = (0, 1),
  names: int = 0,
) -> None:
  """Raises ValueError for a state of another worker or other options, a changed one, or one that is not finite.

  Args:
    state: to resume from.
    worker: number of this worker.
    fragments: F, of this worker.
    where: the number of this process among those of its worker, and how many there are.
    names: `hash_names` of the parameters.

  Example:
    >>> arrays = {"anchor": np.zeros(4, np.uint8), "residual": np.zeros(2, np.float32), "moved": np.ones(2, np.float32)}
    >>> numbers = {"trained": [[0, 0]], "share": 0.5, "latest": 7, "fragments": 1, "part": [0, 1], "names": 0}
    >>> check_state(seal(arrays | numbers, worker=3, run=1), worker=2, fragments=1)
    Traceback (most recent call last):
    ...
    ValueError: Rounds: number=2, but the state was saved by worker 3
  """
  if missing := _ENTRIES.keys() - state.keys():
    raise ValueError(
      f"Rounds: the state has no {', '.join(sorted(missing))}: give what `Rounds.state` was, whole. States of versions "
      "of jaxsparse without these are not read: start from the parameters"
    )
  _check_entries(state)
  if int(state["fragments"]) != fragments:
    raise ValueError(
      f"Rounds: fragments={fragments!r}, but the state was saved with {int(state['fragments'])}"
    )
  if int(state["number"]) != worker:
    raise ValueError(
      f"Rounds: number={worker!r}, but the state was saved by worker {int(state['number'])}"
    )
  if (saved := tuple(np.asarray(state["part"]).tolist())) != where:
    of = "part {} of {}".format
    raise ValueError(
      f"Rounds: this process is {of(*where)} of its worker, but the state was saved by {of(*saved)}"
    )
  if int(state["names"]) != names:
    raise ValueError(
      "Rounds: the state was saved with parameters whose leaves have other names"
    )
  for name in _REAL:
    if not np.isfinite(state[name]).all():
      raise ValueError(f"Rounds: the {name} in the state has NaN or Inf")
  # last, since the errors before name what is wrong
  if int(state["digest"]) != (digest := _digest(state)):
    raise ValueError(
      f"Rounds: the state has changed since it was saved, its digest is {digest:08x} in place of "
      f"{int(state['digest']):08x}: give it as it was saved, or an older one"
    )


def _check_entries(state: SavedState) -> None:
  """Raises ValueError for an entry that is no number, or of another shape."""
  for name, (dtype, dimensions) in _ENTRIES.items():
    entry = np.asarray(state[name])
    is_number = np.issubdtype(entry.dtype, np.floating if name in _REAL else np.integer)
    if (
      not is_number or entry.ndim != dimensions or (name == "part" and entry.size != 2)
    ):
      raise ValueError(
        f"Rounds: the {name} in the state is {entry.dtype.name}{[*entry.shape]}, not {dtype} of "
        f"{dimensions} dimensions, as `Rounds.state` has it"
      )


def _digest(state: SavedState) -> int:
  """CRC-32 of all entries of a state but the digest itself, in the dtypes of `_SEALED`."""
  digest = 0
  for name, (dtype, _) in _SEALED.items():
    digest = zlib.crc32(
      np.ascontiguousarray(np.asarray(state[name], dtype)).data, digest
    )
  return digest

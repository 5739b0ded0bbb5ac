"""`js.metrics`: the communication of a run, read from its optax state."""

import functools
import operator
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from optax import OptState

from jaxsparse import _compat
from jaxsparse._compat import AxisName
from jaxsparse._compat.one_at_a_time import dispatch
from jaxsparse.comm import SoloComm, comm_of
from jaxsparse.transform.checks import check_alive, check_layout, why_none
from jaxsparse.transform.state import (
  LocalState,
  ReduceState,
  RestoredState,
  labelled,
  local_states,
  restored_states,
)
from jaxsparse.types import ArrayTree, Comm, Counters, saturated, saturated_sum

# Fields of `Metrics` that are of the state as a whole: 0 in `parts`.
_WHOLE = ("drift", "since_exchange", "agreement")
# For each field of `Counters`, how its values over groups of leaves and over workers
# become one, ("sum" or "max", "sum", "mean" or "max"). The annotation of a field says
# this after its dtype; "max" fills in what it leaves out.
_COMBINED = [
  (*kind.__metadata__[1:], "max", "max") for kind in Counters.__annotations__.values()
]
_OVER_GROUPS = [how[0] for how in _COMBINED]
_OVER_WORKERS = [how[1] for how in _COMBINED]


class Metrics(NamedTuple):
  """The metrics of the last step, over all workers.

  Attributes:
    counters: the `js.Counters` of all workers. Their fields are attributes of the
      metrics, too: `metrics.words_sent` is `metrics.counters.words_sent`.
    residual_norm: ℓ₂ norm of all residuals together.
    drift: root mean square over workers of the ℓ₂ distance of their parameters to the
      mean (`js.local_steps`), but for residuals that are applied; 0 after an exchange.
    since_exchange: steps since the last exchange, with fragments since that of the last
      one; 0 without local steps.
    words_per_step: with local steps the mean of the words of all steps since the state
      was made, skipped ones included; else `words_sent`.
    agreement: s² of `js.norm_restored` at the last exchange, of all leaves together: 1
      if the workers' updates were equal, 1/P if they had nothing in common; 0 without
      it, and before.
    parts: where a state holds several jaxsparse transforms, the `Metrics` of each by
      its label (that of `optax.multi_transform`, else its path in the state), without
      `drift`, `since_exchange` and `agreement`; the numbers above are over all of them.
      Else empty.

  Example:
    >>> import jax.numpy as jnp, jaxsparse as js
    >>> js.simulate("spardl", jnp.array([[3.0, 4.0, 5.0]]), k=1).metrics.residual_norm
    Array(5., dtype=float32)
  """

  counters: Counters
  residual_norm: jax.Array
  drift: jax.Array
  since_exchange: jax.Array
  words_per_step: jax.Array
  agreement: jax.Array
  parts: ArrayTree = ()

  # Python asks this for names that are neither fields nor methods.
  def __getattr__(self, name: str) -> jax.Array:
    return getattr(self.counters, name)

  def __dir__(self) -> list[str]:
    return [*object.__dir__(self), *Counters._fields]

  @property
  def bytes_sent(self) -> jax.Array:
    """4 times `words_sent`, in float32."""
    return 4 * self.words_sent.astype(jnp.float32)

  @property
  def total_bytes(self) -> jax.Array:
    """4 times `total_words`."""
    return 4 * self.total_words

  @classmethod
  def names(cls) -> tuple[str, ...]:
    """The names of the numbers: those of counters, and all attributes but `counters` and `parts`."""
    # The wraps of `total_words` are in it.
    left_out = {"counters", "parts", "total_wraps"}
    names = dict.fromkeys(Counters._fields + cls._fields)
    return tuple(name for name in names if name not in left_out)

  def as_dict(self) -> dict[str, float]:
    """All numbers as Python floats by name, bytes too, those of `parts` as "label/name": for a logger.

    Example:
      >>> import jax.numpy as jnp, jaxsparse as js
      >>> found = js.simulate("spardl", jnp.array([[3.0, 4.0, 5.0]]), k=1).metrics.as_dict()
      >>> found["residual_norm"], found["bytes_sent"]
      (5.0, 0.0)
      >>> for name, value in found.items():  # tensorboardX, torch.utils.tensorboard
      ...   writer.add_scalar(f"jaxsparse/{name}", value, global_step=1)  # doctest: +SKIP
    """
    numbers = {name: float(getattr(self, name)) for name in self.names()}
    # Python multiplies exactly, float32 would round.
    numbers |= {
      "bytes_sent": 4 * numbers["words_sent"],
      "total_bytes": 4 * numbers["total_words"],
    }
    # `parts` is () or a dict. _WHOLE are numbers of the whole state, 0 in each part.
    for label, of_transform in dict(self.parts).items():
      numbers |= {
        f"{label}/{name}": value
        for name, value in of_transform.as_dict().items()
        if name not in _WHOLE
      }
    return numbers


def metrics(
  state: OptState, over: AxisName | Comm | None = None, *, timeout: float = 60.0
) -> Metrics:
  """Reads the metrics of the last step from an optax state.

  The residual norm is computed here, when it is read, and not in every step: it would
  cost a pass over the residual.

  Args:
    state: an optax state, of a chain too. Outside shard_map it is that of all workers;
      where these belong to several processes, every process must call.
    over: where `state` is that of one worker, inside shard_map and under MPI, the axis
      or comm of all of them; every worker must call then. None reads what `state`
      holds.
    timeout: seconds to wait for other processes that hold a part of the state.

  Raises:
    ValueError: if the state holds no jaxsparse transform, or was donated to a later
      step.
    RuntimeError: if other processes hold a part of the state and one of them does not
      call in time.

  Example:
    >>> import jax, jax.numpy as jnp, jaxsparse as js
    >>> mesh = jax.make_mesh((len(jax.devices()),), ("workers",))
    >>> tx = js.spardl_transform("workers", density=0.5)
    >>> js.metrics(js.init(tx, jnp.zeros(8), mesh, axis="workers")).residual_norm
    Array(0., dtype=float32)
  """
  by_label = labelled(state)
  if not by_label:
    raise ValueError(
      f"metrics: the state holds 0 jaxsparse transforms: {why_none(state)}"
    )
  check_alive({"state": state})
  check_layout(state)
  # In the order of the arguments of `_read`.
  states = list(by_label.values()), local_states(state), restored_states(state)
  if over is None:
    # The numbers are those of all processes, so each has to call. On CPU devices
    # `dispatch` runs one program at a time: several in flight can deadlock.
    _compat.wait_for_processes(state, "js.metrics", timeout)
    combined = dispatch(_of_all_workers, *states)
  else:
    combined = _read(*states, comm_of(over))
  # `combined.parts` is a tuple in the order of `by_label`, empty for one transform.
  return combined._replace(
    parts=dict(zip(by_label, combined.parts, strict=True)) if combined.parts else ()
  )


# Default of the functions below: arrays have the values of all workers already, so a
# reduction over a comm of one worker changes nothing.
_ALL_HERE = SoloComm(1)


def _read(
  states: Sequence[ReduceState],
  local: Sequence[LocalState],
  restored: Sequence[RestoredState],
  comm: Comm = _ALL_HERE,
) -> Metrics:
  """The metrics of a state, with `parts` as a tuple in the order of `states`, empty for a single transform.

  Args:
    states: of all transforms.
    local: of all local steps.
    restored: of all `js.norm_restored`.
    comm: all workers, where the states are those of one; by default the states are
      those of all workers.
  """
  several = states if len(states) > 1 else ()
  parts = tuple(summary([state], comm) for state in several)
  # Sums over leaves of Σ_w ⟨u_w, mean⟩ and Σ_w ⟨u_w, delivered_w⟩; their ratio is s².
  # In an inner optimizer each worker has a row, all equal: hence the maximum.
  rows = [state.products.sum(-2).reshape(-1, 2) for state in restored]
  products = [comm.all_reduce(row.max(0), "max") for row in rows]
  shared, delivered = sum(products, jnp.zeros(2))
  agreement = shared / jnp.where(delivered > 0, delivered, 1.0)
  combined = summary(states, comm)._replace(parts=parts, agreement=agreement)
  if not local:
    return combined
  # Of several local steps the largest number counts, and 0 where `since` is -1.
  numbers = lambda name: jnp.array([getattr(state, name) for state in local])
  since, steps = (numbers(name).max(initial=0) for name in ("since", "steps"))
  # The number of all steps: `steps` leaves out skipped ones, which have sent words all
  # the same.
  count = jnp.maximum(steps + combined.skipped_steps, 1).astype(jnp.float32)
  per_step = lambda values: values._replace(words_per_step=values.total_words / count)
  combined = combined._replace(parts=tuple(map(per_step, parts)))
  return per_step(combined)._replace(drift=drift(local, comm), since_exchange=since)


# One program for all numbers: one for each would take longer, and all would be in
# flight at once.
_of_all_workers = jax.jit(_read)


def summary(states: Sequence[ReduceState], comm: Comm = _ALL_HERE) -> Metrics:
  """The metrics of one or several transforms together, over all workers: those in `states`, and those of `comm`.

  Args:
    states: of all workers, or of one.
    comm: all workers where `states` are of one; by default the states are of all.
  """
  over_workers = functools.partial(_over_workers, comm)
  # `entries` is u32[]; in an inner optimizer u32[P], all equal: hence the maximum.
  entries_of = lambda state: state.layout.entries.astype(jnp.float32).max()
  entries = sum(map(entries_of, states), jnp.float32(0))
  # Each item is (counters, words so far) [P]. Counters of inner optimizers are [P, 1].
  workers = [
    _of_workers(jax.tree.map(jnp.ravel, state.counters), state.devices)
    for state in states
  ]
  counters, words = zip(*workers, strict=True)
  combined = combine_counters(counters, entries) if len(counters) > 1 else counters[0]
  combined = combined._replace(
    skipped=combined.skipped.astype(jnp.int32),
    total_words=sum(words, jnp.float32(0)),
  )
  # Each counter becomes one number over workers, as its annotation in `Counters` says.
  over_all = Counters(*map(over_workers, combined, _OVER_WORKERS))
  # One root at the end: the norm of all residuals as one vector.
  squares = [
    over_workers(x**2, "sum")
    for x in jax.tree.leaves([state.carried.residual for state in states])
  ]
  return Metrics(
    over_all._replace(skipped=over_all.skipped > 0),
    residual_norm=jnp.sqrt(sum(squares, jnp.float32(0))),
    drift=jnp.float32(0),
    since_exchange=jnp.int32(0),
    # Each step exchanges, unless `_read` finds local steps.
    words_per_step=over_all.words_sent.astype(jnp.float32),
    agreement=jnp.float32(0),
  )


def _over_workers(
  comm: Comm, x: jax.Array, op: Literal["sum", "max", "mean"]
) -> jax.Array:
  """The sum, maximum or mean of the entries of x, at all workers of a comm; a sum of integers saturates."""
  if op == "mean":
    x = x.astype(jnp.float32)
  elif op == "sum" and jnp.issubdtype(x.dtype, jnp.integer):
    # Each addend is clipped to its share of the largest integer.
    largest = jnp.iinfo(x.dtype).max // (x.size * comm.size)
    x = jnp.minimum(x, largest)
  x = getattr(jnp, op)(x)
  return comm.all_reduce(x) / comm.size if op == "mean" else comm.all_reduce(x, op)


def drift(states: Sequence[LocalState], comm: Comm) -> jax.Array:
  """The distance between workers, f32[]: the root of the mean over workers of ‖parameters − their mean‖².

  Args:
    states: of all workers, or of this one.
    comm: all workers, where `states` are those of one.
  """
  total = jnp.float32(0)
  # `moved` is θ − θ_w, [workers, …]: its distances are those of the parameters.
  for leaf in jax.tree.leaves([state.moved for state in states]):
    workers = leaf.shape[0] * comm.size
    mean = comm.all_reduce(leaf.sum(0, keepdims=True)) / workers
    total += jnp.sum((leaf - mean) ** 2) / workers
  return jnp.sqrt(comm.all_reduce(total))


def _of_workers(counters: Counters, devices: int) -> tuple[Counters, jax.Array]:
  """The counters of each worker, [P], and its words sent since the state was made, f32[P].

  Args:
    counters: of each device of each worker, [P · S], a worker's devices side by side.
    devices: number of devices of a worker, S.
  """
  # Two u32 make up the total: JAX has no 64-bit integers without x64.
  words = counters.total_wraps.astype(
    jnp.float32
  ) * 2.0**32 + counters.total_words.astype(jnp.float32)
  if devices == 1:
    return counters, words
  # [P · S] as rows [S, P], one a device. Counters may be sharded over devices: gathered
  # before the reshape.
  by_device = lambda x: _compat.resharded(x, PartitionSpec()).reshape(-1, devices).T
  rows = jax.tree.map(by_device, counters)
  each = [jax.tree.map(operator.itemgetter(device), rows) for device in range(devices)]
  # Devices are combined as groups of leaves are. The 1 is the number of entries, used
  # for the density alone, which is replaced here: by the mean over devices, which have
  # equally many entries.
  combined = combine_counters(each, 1)._replace(density=rows.density.mean(0))
  return combined, by_device(words).sum(0)


def combine_counters(counters: Sequence[Counters], n: int | jax.Array) -> Counters:
  """The counters of several transforms, groups of leaves or devices as those of one step of n entries.

  Each counter is their sum or maximum, as its annotation in `Counters` says; but the
  density is the sum of `delivered`, divided by n.
  """
  combine = {
    "sum": lambda values: saturated(saturated_sum(*values), values[0].dtype),
    "max": lambda values: jnp.stack(values).max(0),
  }
  # Each item is ("sum" or "max", the values of one field).
  columns = zip(_OVER_GROUPS, *counters, strict=True)
  combined = Counters(*[combine[how](values) for how, *values in columns])
  # A mean of densities would weigh small transforms as much as large ones.
  return combined._replace(
    density=combined.delivered.astype(jnp.float32) / jnp.float32(n)
  )


def count_step(
  reduced: Sequence[Counters],
  n: int,
  before: Counters,
  finite: jax.Array,
  update: jax.Array,
) -> Counters:
  """The counters of a step of n entries from those of its reductions, in the dtypes of those `before` it.

  Words are added to those of all steps in two u32, the lower and the upper 32 bits.

  Args:
    reduced: of each group of leaves, scalars.
    n: entries of all groups.
    before: [1] each, of the step before.
    finite: bool[], whether the step takes place.
    update: f32[…] of the step; its values do not matter, see the last comment.
  """
  pairs = [zip(counters, before, strict=True) for counters in reduced]
  steps = [
    Counters(*[saturated(new, old.dtype).reshape(1) for new, old in pair])
    for pair in pairs
  ]
  step = combine_counters(steps, n) if len(steps) > 1 else steps[0]
  # The sum of u32 wraps around, and is then less than what was added.
  total = before.total_words + step.words_sent
  step = step._replace(
    density=step.delivered.astype(jnp.float32) / float(n),
    skipped_steps=before.skipped_steps + (~finite).astype(jnp.int32),
    total_words=total,
    total_wraps=before.total_wraps + (total < step.words_sent).astype(jnp.uint32),
    skipped=~finite.reshape(1),
  )
  # `always_false` is computed at run time, so that XLA cannot fold it and writes all
  # counters in one kernel of a GPU: constants among them would take a copy each. There
  # it reads an entry of `update`, since XLA would copy scalars, too: the bits of an f32
  # without its sign are no negative integer. Elsewhere it reads a count, never < 0.
  bits = lambda x: jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7FFF_FFFF
  steps = before.skipped_steps
  of_array = lambda: (bits(update[:1]) < 0) & (steps >= 0)
  always_false = _compat.by_platform(gpu=of_array, default=lambda: steps < 0)()
  return optax.tree.where(always_false, before, step)

"""Runs the exchanges of a worker of rounds in a thread of its own, while its device computes."""

import functools
import logging
from collections.abc import Callable
from concurrent import futures

import jax
import jax.numpy as jnp
import optax

from jaxsparse.arrays.flatten import all_finite
from jaxsparse.partial.net.messages import (
  LEAVING,
  MOST_MEMBERS,
  RoundPosition,
  WorkerGroup,
  WorkerMessage,
)
from jaxsparse.partial.rounds import links
from jaxsparse.partial.rounds.anchor import OwnAnchor
from jaxsparse.partial.rounds.outer_step import Anchor, OuterStep
from jaxsparse.partial.rounds.run import Done, Outgoing, Run

_LOG = logging.getLogger(__name__)
_AT_START = 3  # so many sizes of group, the largest, are compiled before round 1
_all_finite = jax.jit(all_finite)
# whether any entry of a pytree is not 0
_any = jax.jit(
  lambda tree: jnp.array([jnp.any(leaf) for leaf in jax.tree.leaves(tree)]).any()
)


class Exchanger(OwnAnchor):
  """The anchor of a worker, and its exchanges, one at a time.

  The anchor is the outer parameters θ, equal on all workers, with the state of the
  outer chain and this worker's residual.

  Args:
    outer: the outer step; also an attribute.
    anchor: before the first round; as an attribute after the last one that counted.
    worker: number of this worker.
    is_link: whether this worker is a link, which does not train: it brings what others
      have moved; also an attribute.

  Attributes:
    is_final: whether this worker leaves for good.
    delta: θ − θ_w, f32 on the CPU, what this worker gives in the next round.
    delivered: the `Result` of the last round of this worker that counted.
    post: gives the protocol of this worker an event.
    _run: the exchange that was begun last.
    _sizes: of the smallest and the largest group: `_compile` compiles steps for these
      and the sizes between them only.
    _thread: one thread, in which exchanges run, and copies to the CPU.
    _compiler: one thread, which compiles the outer step for sizes of group to come.
  """

  # gives the protocol an event; to be set before the first exchange
  post: Callable[[Done | Outgoing | Exception], None]

  def __init__(
    self, outer: OuterStep, anchor: Anchor, worker: int, is_link: bool = False
  ):
    super().__init__(outer, anchor, worker)
    self.is_final = False
    self.is_link = is_link
    self._sizes = 1, 1
    self._run: Run | None = None
    self._thread = futures.ThreadPoolExecutor(1)
    self._compiler = futures.ThreadPoolExecutor(1)

  def begin(self, group: WorkerGroup) -> Run:
    """Starts the exchange of a group."""
    entries = sum(leaf.size for leaf in jax.tree.leaves(self.anchor.params))
    # `room`: 4-byte words of one member's messages that may wait, twice an index and a
    # value of each entry: more than an honest member sends ahead.
    run = self._run = Run(
      group, self._worker, self.post, room=4 * entries + MOST_MEMBERS
    )
    self._submit(functools.partial(self._exchange, run, self.anchor, self.delta))
    return run

  def _submit(self, work: Callable[[], None]) -> None:
    """Calls `work` in `_thread`; posts the error that it raises, which the training loop then raises."""

    def run() -> None:
      try:
        work()
      except Exception as error:
        self.post(error)

    self._thread.submit(run)

  def _exchange(self, run: Run, anchor: Anchor, delta: optax.Params) -> None:
    """Runs the exchange of a group, in `_thread`; posts `Done` with the digest of its result.

    Args:
      run: the exchange; gets the result.
      anchor: before the round.
      delta: θ − θ_w of this worker, f32 on the CPU.
    """
    group = run.group
    rank = group.members.index(self._worker)
    size = len(group.members)
    # The mean is without a link's movement: `add_moved` adds it to the result.
    weight = 0.0 if self.is_link else group.weights[rank]
    # Messages are matched by their numbers in the round, so all members make these
    # three calls, in this order.
    result = self.outer.run(
      anchor, delta, weight, size, rank, group.number, run.exchange
    )
    result = links.add_moved(
      self.outer, anchor, result, delta, group, rank, run.exchange
    )
    result = links.pass_residuals(self.outer, result, group, rank, run.exchange)
    # The anchor notes the group as the last one of its members.
    if not result.skipped:
      after = result.anchor.has_moved(group.members, group.number)
      result = result._replace(anchor=after)
    run.result = result
    run.digest = self.outer.digest(run.result.anchor)
    # After a failure the program has received zeros: its result is of no use.
    self.post(Done(group.number, None if run.failed else run.digest))

  def skip(self) -> int:
    """Replaces the result of the round under way by one with a skipped outer step; returns the digest of its anchor.

    A process skips where its part of the total is not finite. In a round the slices of
    all processes of a worker must move, or none, so all skip if one does.
    """
    run = self._run
    assert run
    assert run.result
    if not run.skipped:
      run.result = self.outer.skip(self.anchor, run.result)
      run.digest = self.outer.digest(run.result.anchor)
    return run.digest

  def commit(self) -> RoundPosition:
    """Makes the result of the exchange the anchor, since all members have theirs: the round counts."""
    run = self._run
    assert run
    assert run.result
    if run.skipped:
      _LOG.warning(
        f"worker {self._worker}: {run.group.round} is skipped: "
        "the sum of what they gave, or the outer step, is not finite"
      )
    position = self.replace(run.group, run.result, run.digest)
    run.result = self.delivered  # the same result, without its large totals
    # `_thread` is idle now. It packs the totals of the round, the link that `replace`
    # has added, for workers that have missed it. They are kept if they are fewer bytes
    # than the anchor.
    most = self.outer.size(self.anchor)
    self._submit(functools.partial(self._links[-1].pack, most))
    # The sizes of the next group if a worker is lost, or joins.
    for size in (self.anchor.size - 1, self.anchor.size + 1):
      self._compiler.submit(self._compile, size)
    return position

  def drop(self) -> None:
    """Gives up the exchange that was begun last: if it still runs, it soon ends without a result."""
    if self._run:
      self._run.fail()

  def compile(self, sizes: tuple[int, int]) -> None:
    """Compiles the outer step for the sizes of group that this worker meets first; blocks until that is done.

    Args:
      sizes: of the smallest group, the quorum, and of the largest, all workers.
    """
    self._sizes = sizes
    # Number of members of the last round; 0 before the first one, which has nearly all
    # workers. Later the next round has as many members, or one more with this worker.
    last = self.anchor.size
    for size in (last, last + 1) if last else range(sizes[1], sizes[1] - _AT_START, -1):
      self._compile(size)

  def _compile(self, size: int) -> None:
    """Compiles the outer step for groups of a size, if a group may have it."""
    if self._sizes[0] <= size <= self._sizes[1]:
      self.outer.compile(self.anchor, size)

  def prepare(
    self,
    delta: optax.Params,
    shared: optax.Params,
    post: Callable[[WorkerMessage], None],
  ) -> None:
    """Copies to the CPU what this worker gives, and calls `post(the request to make)`, in the thread of exchanges.

    Args:
      delta: θ − θ_w of the worker, f32 leaves on its devices.
      shared: the leaves of `delta`, or this process's slices of them, to exchange.
      post: is called afterwards with the kind of the request: for a round, or
        NOT_FINITE.
    """
    # Dispatched now, before the next training step; the thread waits for the result.
    finite = _all_finite(delta)
    # With READY, in place of LINK, the members await no movement of this link.
    has_moved = self.is_link and _any(delta)

    def copy() -> None:
      self.delta = self.outer.on_cpu(shared)
      kind = WorkerMessage.LINK if has_moved else WorkerMessage.READY
      if self.is_final:
        kind = LEAVING[kind]
      post(kind if finite else WorkerMessage.NOT_FINITE)

    self._submit(copy)

  def close(self) -> None:
    """Ends the threads; an exchange that runs is dropped."""
    self.drop()
    for thread in (self._thread, self._compiler):
      thread.shutdown(cancel_futures=True)

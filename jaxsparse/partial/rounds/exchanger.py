"""Runs the exchanges of a worker of rounds in a thread of its own, while its device computes."""

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
_FIRST = 3  # sizes of groups for which a worker compiles before the first round
_all_finite = jax.jit(all_finite)
_any = jax.jit(
  lambda tree: jnp.array([jnp.any(leaf) for leaf in jax.tree.leaves(tree)]).any()
)


class Exchanger(OwnAnchor):
  """The anchor of a worker, and its exchanges, one at a time.

  Args:
    outer, anchor, worker: as of `OwnAnchor`.
    is_link: whether it is a link; also an attribute.

  Attributes:
    is_final: whether this worker leaves for good.
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
    run = self._run = Run(
      group, self._worker, self.post, room=4 * entries + MOST_MEMBERS
    )
    self._thread.submit(self._exchange, run, self.anchor, self.delta)
    return run

  def _exchange(self, run: Run, anchor: Anchor, delta: optax.Params) -> None:
    group = run.group
    rank = group.members.index(self._worker)
    try:
      size = len(group.members)
      # a link gives all by itself
      weight = 0.0 if self.is_link else group.weights[rank]
      # All members send the messages of these three in this order, and number them
      # alike.
      result = self.outer.run(
        anchor, delta, weight, size, rank, group.number, run.exchange
      )
      result = links.add_moved(
        self.outer, anchor, result, delta, group, rank, run.exchange
      )
      result = links.pass_residuals(self.outer, result, group, rank, run.exchange)
      if not result.skipped:
        after = result.anchor.has_moved(group.members, group.number)
        result = result._replace(anchor=after)
      run.result = result
      run.digest = self.outer.digest(run.result.anchor)
      self.post(Done(group.number, None if run.failed else run.digest))
    except Exception as error:  # raised by the training loop
      self.post(error)

  def skip(self) -> int:
    """Replaces the computed result by that of a skipped round, as another process of the worker has; its digest."""
    run = self._run
    assert run
    assert run.result
    if not run.skipped:
      run.result = self.outer.skip(self.anchor, run.result)
      run.digest = self.outer.digest(run.result.anchor)
    return run.digest

  def commit(self) -> RoundPosition:
    """The result of the exchange that is done counts."""
    run = self._run
    assert run
    assert run.result
    if run.skipped:
      _LOG.warning(
        f"worker {self._worker}: {run.group.round} is skipped: "
        "the sum of what they gave, or the outer step, is not finite"
      )
    position = self.replace(run.group, run.result, run.digest)
    run.result = self.delivered
    # while it has nothing else to do
    self._thread.submit(self._links[-1].pack, self.outer.size(self.anchor))
    # the sizes of the group if a worker is lost, or joins
    for size in (self.anchor.size - 1, self.anchor.size + 1):
      self._compiler.submit(self._compile, size)
    return position

  def drop(self) -> None:
    """The exchange that was begun last counts for nobody."""
    if self._run:
      self._run.fail()

  def compile(self, sizes: tuple[int, int]) -> None:
    """Compiles the outer step for the group that this worker joins, with it and without; at first for the largest.

    Args:
      sizes: the smallest and the largest group.
    """
    self._sizes = sizes
    last = self.anchor.size
    for size in (last, last + 1) if last else range(sizes[1], sizes[1] - _FIRST, -1):
      self._compile(size)

  def _compile(self, size: int) -> None:
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
      delta: by the worker.
      shared: what of it this process exchanges.
      post: is called afterwards.
    """
    finite = _all_finite(delta)  # on the device, before the next step that it is given
    has_moved = self.is_link and _any(delta)

    def copy() -> None:
      self.delta = self.outer.on_cpu(shared)
      kind = WorkerMessage.LINK if has_moved else WorkerMessage.READY
      if self.is_final:
        kind = LEAVING[kind]
      post(kind if finite else WorkerMessage.NOT_FINITE)

    self._thread.submit(copy)

  def close(self) -> None:
    """Ends the threads; an exchange that runs is dropped."""
    self.drop()
    for thread in (self._thread, self._compiler):
      thread.shutdown(cancel_futures=True)

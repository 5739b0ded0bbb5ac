"""Runs before the programs of Levanter's tests: writes down rounds, and looks at buffers that are donated."""

import os
import pathlib
import signal
import time

import jax
import numpy as np

import jaxsparse as js

Rounds = js.partial.Rounds
begin, apply, step = Rounds._begin, Rounds._apply, Rounds.step
handed, begun, calls = [], [], [0]


def flat(tree):
  return np.concatenate(
    [np.ravel(np.asarray(leaf, np.float32)) for leaf in jax.tree.leaves(tree)]
  )


def buffers(tree):
  arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
  assert not any(leaf.is_deleted() for leaf in arrays)
  return {
    shard.data.unsafe_buffer_pointer()
    for leaf in arrays
    for shard in leaf.addressable_shards
  }


def note_begin(self, params):
  begun[:] = [flat(params)]
  begin(self, params)


def note_round(self, params):
  """Writes a round of this worker: anchors and residuals before and after, what it gave, and its parameters."""
  before, given = self._exchanger._before
  own = apply(self, params)
  anchor, residual = self._exchanger.anchor, self._exchanger.outer.residual
  weight = self.group.weights[self.group.members.index(self._worker)]
  found = {
    "before": flat(before.params),
    "after": flat(anchor.params),
    "given": weight * flat(given),
    "begun": begun[0],
  }
  moved = (
    residual(anchor).sum() - residual(before).sum()
    if before.size
    else residual(anchor).sum()
  )
  np.savez(
    f"round{self.round}.npz",
    params=flat(params),
    own=flat(own),
    residual=moved,
    **found,
  )
  return own


def check_step(self, params, weight=1):
  """Levanter has donated what it was given last; nothing that is kept is in a buffer that it will donate."""
  assert all(leaf.is_deleted() for leaf in handed)
  own = step(self, params, weight)
  handed[:] = jax.tree.leaves(own)
  kept = vars(self) | vars(self._exchanger)
  del kept["params"]  # what training began from, which is for the loop
  assert buffers(kept)
  assert not buffers(kept) & buffers(handed)
  calls[0] += 1
  die_in_a_round(self, own)
  return own


def die_in_a_round(worker, own):
  """With DIES: once Levanter has written the checkpoint of step 27, while a round is under way."""
  if "DIES" in os.environ and calls[0] == 28:
    np.save("at_the_checkpoint.npy", flat(own))
  if "DIES" in os.environ and calls[0] == 30:
    assert worker._flight is not None
    while not [*pathlib.Path("checkpoints").rglob("step-27/metadata.json")]:
      time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)


Rounds._begin, Rounds._apply, Rounds.step = note_begin, note_round, check_step

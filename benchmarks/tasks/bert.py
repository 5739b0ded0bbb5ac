"""A small masked language model on bytes: the transformer of `lm` without its causal mask.

Of each window 15 % of the bytes are replaced by byte 0, which the text does not have, and are to be predicted. (BERT
itself leaves a tenth of these as they are and replaces another by random words.)
"""

import numpy as np
from flax import nnx

from benchmarks.tasks import lm, text
from benchmarks.tasks.base import IGNORED, Arrays, Task, drawn

_MASKED = 0.15


def make() -> Task:
  """3 blocks of width 128: 664,320 parameters."""
  module = lambda seed: lm.Transformer(nnx.Rngs(seed), width=128, blocks=3, bias=False, causal=False)
  source = text.library()
  held_out = _masked(np.random.default_rng(0), lm.sample(source.held_out)[:, :-1])

  def draw(random: np.random.Generator, size: int) -> Arrays:
    return _masked(random, lm.draw(source.train, random, size)[:, :-1])

  return Task("bert", str(source), module, drawn(draw), held_out)


def _masked(random: np.random.Generator, windows: np.ndarray) -> Arrays:
  hidden = random.random(windows.shape) < _MASKED
  return np.where(hidden, np.uint8(0), windows), np.where(hidden, windows.astype(np.int32), IGNORED)

"""Images of 32 × 32 in three colours for the papers' networks: CIFAR-10 where the user has it, else digits.

The digits of scikit-learn have 8 × 8 pixels; each becomes 4 × 4 in each colour. They are easier than CIFAR-10: a race
on them compares methods, and reproduces no accuracy.
"""

import hashlib
from collections.abc import Callable

import numpy as np
from flax import nnx

from benchmarks.tasks import data
from benchmarks.tasks.base import Arrays, Task, drawn

SIDE = 32


def make(
  name: str, module: Callable[[int], nnx.Module], data_dir: str | None, shape: tuple[int, int, int] = (SIDE, SIDE, 3)
) -> Task:
  """The task of classifying images with `module`, whose inputs have this shape."""
  images = data.load("cifar10", data_dir) if data_dir else data.load("digits")
  train, test = (_shaped(part, shape) for part in (images.train_images, images.test_images))
  digest = hashlib.sha256(images.train_images.tobytes() + images.test_images.tobytes()).hexdigest()
  source = f"{'CIFAR-10' if data_dir else 'the digits of scikit-learn'} ({len(train):,} images, SHA-256 {digest[:12]})"

  def draw(random: np.random.Generator, size: int) -> Arrays:
    chosen = random.integers(0, len(train), size)
    return train[chosen], images.train_labels[chosen]

  return Task(name, source, module, drawn(draw), (test, images.test_labels))


def _shaped(images: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
  """Images enlarged to at least `shape`, cut around their centre; one colour becomes three, or three become one."""
  times = -(-shape[0] // images.shape[1])
  large = images.repeat(times, 1).repeat(times, 2)
  first = (large.shape[1] - shape[0]) // 2
  large = large[:, first : first + shape[0], first : first + shape[1]]
  return np.broadcast_to(large.mean(-1, keepdims=True) if shape[2] == 1 else large, (len(large), *shape))

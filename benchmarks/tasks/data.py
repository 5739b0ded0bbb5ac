"""Data sets for training runs: the digits inside scikit-learn, and CIFAR-10 from its binary files."""

import pathlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

FOLDS = 5  # of the digits, unless something else is asked for
CLASSES = 10
CIFAR10_FILES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")


class Dataset(NamedTuple):
  """Images f32[count, height, width, channels] with mean 0 and deviation 1 over the training set, labels i32[count]."""

  name: str
  train_images: np.ndarray
  train_labels: np.ndarray
  test_images: np.ndarray
  test_labels: np.ndarray


def load(
  name: str, data_dir: str | None = None, fold: int = 0, folds: int = FOLDS
) -> Dataset:
  """The "digits", every `folds`-th image from `fold` on for the test, or "cifar10" in `data_dir`, or in this folder."""
  loaders = {
    "digits": lambda: _digits(fold, folds),
    "cifar10": lambda: _cifar10(pathlib.Path(data_dir or ".")),
  }
  return loaders[name]()


def epochs(
  images: np.ndarray, labels: np.ndarray
) -> Callable[[int, int, int], Iterator[dict[str, np.ndarray]]]:
  """The stream of a task (`benchmarks.tasks.base`): shuffled epochs, each without its incomplete last batch."""

  def stream(seed: int, workers: int, size: int) -> Iterator[dict[str, np.ndarray]]:
    count, given = workers * size, len(images)
    if count > given:
      raise ValueError(
        f"a batch of {count} does not fit in {given} training images: use a smaller --batch_size"
      )
    return batches(np.random.default_rng(seed), count)

  def batches(
    random: np.random.Generator, size: int
  ) -> Iterator[dict[str, np.ndarray]]:
    while True:
      order = random.permutation(len(images))
      for start in range(0, len(order) - size + 1, size):
        chosen = order[start : start + size]
        yield {"input": images[chosen], "label": labels[chosen]}

  return stream


def apart(
  images: np.ndarray, labels: np.ndarray, alpha: float
) -> Callable[..., Iterator[dict[str, np.ndarray]]]:
  """The stream of a task in which each worker draws from images of its own: of each class a share ~ Dirichlet(α).

  The smaller α, the fewer classes a worker has; with α = ∞ all have the same share of
  each.
  """

  def stream(seed: int, workers: int, size: int) -> Iterator[dict[str, np.ndarray]]:
    rows = _shares(np.random.default_rng([seed, workers]), labels, workers, alpha)
    return batches(
      [np.random.default_rng([seed, worker]) for worker in range(workers)], rows, size
    )

  def batches(
    randoms: list, rows: list[np.ndarray], size: int
  ) -> Iterator[dict[str, np.ndarray]]:
    while True:
      drawn = [
        random.choice(own, size) for random, own in zip(randoms, rows, strict=True)
      ]
      chosen = np.concatenate(drawn)
      yield {"input": images[chosen], "label": labels[chosen]}

  return stream


def _shares(
  random: np.random.Generator, labels: np.ndarray, workers: int, alpha: float
) -> list[np.ndarray]:
  """The rows of each worker, drawn again until each has half of its fair number at least."""
  while True:
    parts: list[list[np.ndarray]] = [[] for _ in range(workers)]
    for label in np.unique(labels):
      share = (
        np.full(workers, 1 / workers)
        if np.isinf(alpha)
        else random.dirichlet(np.full(workers, alpha))
      )
      rows = random.permutation(np.flatnonzero(labels == label))
      for part, own in zip(
        parts,
        np.split(rows, np.round(share.cumsum()[:-1] * len(rows)).astype(int)),
        strict=True,
      ):
        part.append(own)
    whole = [np.concatenate(part) for part in parts]
    if min(map(len, whole)) >= len(labels) / workers / 2:
      return whole


def equal_shares(seed: int, labels: np.ndarray, workers: int) -> list[np.ndarray]:
  """The rows of each worker: an equal part of those of each class."""
  return _shares(np.random.default_rng([seed, workers]), labels, workers, np.inf)


def seed_of(seed: int, worker: int) -> int:
  """A seed of a worker's own."""
  return int(np.random.SeedSequence([seed, worker]).generate_state(1)[0])


def _digits(fold: int, folds: int) -> Dataset:
  """1,797 handwritten digits of 8 × 8 pixels, one of every `folds` for the test."""
  # slow to import, and not needed for CIFAR-10
  from sklearn.datasets import (
    load_digits,
  )

  digits = load_digits()
  images = digits.images[..., None].astype(np.float32)
  test = np.arange(len(images)) % folds == fold
  return _standardized(
    Dataset(
      "digits", images[~test], digits.target[~test], images[test], digits.target[test]
    )
  )


def _cifar10(folder: pathlib.Path) -> Dataset:
  if (folder / "cifar-10-batches-bin").is_dir():
    folder = folder / "cifar-10-batches-bin"
  missing = [name for name in CIFAR10_FILES if not (folder / name).is_file()]
  if missing:
    expected = f"expected the files of the binary version of the data set, unpacked: {', '.join(CIFAR10_FILES)}"
    raise FileNotFoundError(
      f"CIFAR-10: {folder} has no {', '.join(missing)}; {expected}"
    )
  *train, (test_images, test_labels) = (
    _cifar10_file(folder / name) for name in CIFAR10_FILES
  )
  images, labels = (np.concatenate(parts) for parts in zip(*train, strict=True))
  return _standardized(Dataset("cifar10", images, labels, test_images, test_labels))


def _cifar10_file(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
  """Images and labels of one file, whose records are a label u8, 0 … 9, and u8[3072], channel by channel."""
  content = np.fromfile(path, np.uint8)
  if not content.size or content.size % 3073 or (content[::3073] >= CLASSES).any():
    raise ValueError(
      f"CIFAR-10: {path} is not records of 3073 bytes that begin with a label of 0 … 9"
    )
  rows = content.reshape(-1, 3073)
  return rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1).astype(
    np.float32
  ), rows[:, 0]


def _standardized(raw: Dataset) -> Dataset:
  mean, deviation = raw.train_images.mean(), raw.train_images.std() + 1e-6
  train, test = (
    ((x - mean) / deviation).astype(np.float32)
    for x in (raw.train_images, raw.test_images)
  )
  return Dataset(
    raw.name,
    train,
    raw.train_labels.astype(np.int32),
    test,
    raw.test_labels.astype(np.int32),
  )

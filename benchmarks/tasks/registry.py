"""The tasks of `benchmarks.race` by name."""

from collections.abc import Callable

from benchmarks.tasks import bert, fnn3, lm, lstm, resnet20, vgg16
from benchmarks.tasks.base import Task

TEXTS: dict[str, Callable[[], Task]] = {
  "lm": lm.large,
  "lm_medium": lm.medium,
  "lstm": lstm.make,
  "bert": bert.make,
}
IMAGES: dict[str, Callable[[str | None], Task]] = {
  "resnet20": resnet20.make,
  "vgg16": vgg16.make,
  "fnn3": fnn3.make,
}


def make(name: str, data_dir: str | None = None) -> Task:
  """The task of that name."""
  if name in TEXTS:
    if data_dir:
      raise ValueError(f"--data_dir={data_dir} is for tasks on images, {', '.join(IMAGES)}; --task={name} has a text")
    return TEXTS[name]()
  if name not in IMAGES:
    raise ValueError(f"--task={name}, choose one of {', '.join([*TEXTS, *IMAGES])}")
  return IMAGES[name](data_dir)

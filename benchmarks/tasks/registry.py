"""The tasks of `benchmarks.race` by name."""

from benchmarks.tasks import data, images, lm
from benchmarks.tasks.base import Task

TEXTS = {
  "lm": lm.large,
  "lm_small": lm.narrow,
  "lm_medium": lm.medium,
  "lm_wide": lm.wide,
  "lstm": lm.recurrent,
  "bert": lm.masked,
}
IMAGES = (*images.NETWORKS, *images.SMALL)


def make(name: str, data_dir: str | None = None) -> Task:
  """The task of that name; `data_dir` is the folder of CIFAR-10, for images, which are digits without it."""
  if name in TEXTS:
    if data_dir:
      raise ValueError(
        f"--data_dir={data_dir} is for tasks on images, {', '.join(IMAGES)}; --task={name} has a text"
      )
    return TEXTS[name]()
  if name in images.SMALL:
    return images.make_small(
      name, data.load("cifar10" if data_dir else "digits", data_dir)
    )
  return images.make(name, data_dir)

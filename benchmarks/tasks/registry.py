"""The tasks of `benchmarks.race` by name."""

import functools
from collections.abc import Callable

from benchmarks.tasks import (
  adapters,
  cartpole,
  data,
  flow,
  images,
  letters,
  lm,
  physics,
  recommender,
)
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
_APART = {
  "recommender": recommender.make,
  "flow": flow.make,
  "letters": letters.make,
  "physics": physics.make,
  "adapters": adapters.make,
}
# made or rendered here; "_apart": workers have data of their own
MADE: dict[str, Callable[[], Task]] = {
  **_APART,
  **{f"{name}_apart": functools.partial(make, True) for name, make in _APART.items()},
  "cartpole": cartpole.make,
  "mlp_apart": lambda: images.make_small("mlp", data.load("digits"), 0.1)._replace(
    name="mlp_apart"
  ),
}
NAMES = (*TEXTS, *IMAGES, *MADE)


def make(name: str, data_dir: str | None = None) -> Task:
  """The task of that name; `data_dir` is the folder of CIFAR-10, for images, which are digits without it."""
  if name not in IMAGES:
    if data_dir:
      raise ValueError(
        f"--data_dir={data_dir} is for tasks on images, {', '.join(IMAGES)}; --task={name} has others"
      )
    return (TEXTS | MADE)[name]()
  if name in images.SMALL:
    return images.make_small(
      name, data.load("cifar10" if data_dir else "digits", data_dir)
    )
  return images.make(name, data_dir)

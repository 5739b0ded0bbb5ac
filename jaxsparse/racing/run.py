"""`js.race`: methods tried on a user's own model, data and network."""

import json
import math
import operator
import os
import pathlib
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxsparse.comm import SimComm
from jaxsparse.costs.calibration import Profile
from jaxsparse.racing.batching import Batches
from jaxsparse.racing.recipes import Method, recipes
from jaxsparse.racing.result import DENSE, Race, Row
from jaxsparse.racing.training import Setting
from jaxsparse.racing.tuning import RaceConfig
from jaxsparse.train.agreement import Agreement
from jaxsparse.train.engine import engine_of
from jaxsparse.types import ArrayTree, Link

_ALPHA = 1e-4  # seconds of a message between hosts
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}


def race(
  loss_fn: Callable[..., ArrayTree],
  params: Any,
  batches: Batches,
  evaluate: Callable[..., Any],
  *,
  workers: int | Mesh,
  steps: int,
  rate: float,
  methods: dict[str, Method] | None = None,
  rates: Sequence[float] = (0.5, 1.0, 2.0),
  seeds: int = 2,
  links: Sequence[str] = ("1gbit", "100mbit"),
  profile: Profile | None = None,
  budget: float = math.inf,
  file: str | pathlib.Path | None = None,
  progress: Callable[[str], object] | None = None,
  axis: str = "workers",
  has_aux: bool = False,
  accumulate: int = 1,
  rng: jax.Array | None = None,
  model_state: ArrayTree = None,
  **given: ArrayTree,
) -> Race:
  """Trains a model by several methods, each at several rates, and compares them with dense training.

  P workers are simulated on one device, or are those of a mesh. Every method trains
  from the same parameters on the same batches. The worse half of the rates ends after
  a fifth of the steps, and again after half of them, by the mean loss over the seeds;
  dense is tuned in the same way. A method whose loss is above dense's from the same
  seed goes on, for half as many steps more at most, so that its steps to that loss are
  known.

  Args:
    loss_fn: as for `js.make_train_step`.
    params: the parameters; or a function of the seed, 0, 1, …, that returns them.
    batches: a function of the step that returns the batch of all workers, which is
      called with steps up to about `1.5 · seeds · steps`; or an iterable of batches
      that can begin again, without those of fewer rows than the first one. Each seed
      has other batches, or the same ones from another start.
    evaluate: (params) -> float, the loss on held-out data; (params, model_state) with a
      model state.
    workers: number of workers P, or a mesh.
    steps: of each training, at least 2: the first one also compiles.
    rate: your own learning rate, of dense training.
    methods: functions (axis, rate) -> chain by name, one of them "dense"; by default
      `js.recipes("adam", workers=P)`.
    rates: multiples of `rate` to try.
    seeds: number of trainings of each method at each rate.
    links: bandwidths as in "1gbit" or "100mbit", at 0.1 ms a message.
    profile: from `js.costs.fit`: one more link, "profile".
    budget: seconds after which no further method is begun.
    file: the path of a file that keeps finished methods: an interrupted race that is
      called again skips them. None for no file.
    progress: called with a line of text now and then, `print` for instance.
    axis: the axis of the mesh, or the name for `jax.lax.psum` in `loss_fn`.
    has_aux: as for `js.make_train_step`.
    accumulate: as for `js.make_train_step`.
    rng: a key, of which each step and worker gets its own.
    model_state: before the first step; that of the workers is averaged.
    **given: other arguments of each step, as for `js.make_train_step`: `shared=` for
      instance.

  Returns:
    A `Race`: `print` it for a table; `best(link)`, `plot()`, `evidence`, `rows`.

  Raises:
    ValueError: for arguments outside their choices, batches that cannot begin again,
      or a file of another race or in a folder that is missing.

  Example:
    >>> import jax, jax.numpy as jnp, jaxsparse as js
    >>> target = jax.random.normal(jax.random.key(0), (16,))
    >>> def batches(step):
    ...   x = jax.random.normal(jax.random.key(step), (8, 16))
    ...   return x, x @ target
    >>> loss = lambda w, batch: jnp.mean((batch[0] @ w - batch[1]) ** 2)
    >>> methods = js.recipes("sgd", workers=2)
    >>> methods = {name: methods[name] for name in ("dense", "4 bits")}
    >>> race = js.race(loss, jnp.zeros(16), batches, lambda w: loss(w, batches(10**6)), methods=methods,
    ...   workers=2, steps=20, rate=0.02)
    >>> print(race)
    16 parameters, 2 workers, 20 steps, seeds: 2, rates in multiples of 0.02
    method  rate ...
    dense     2* ...
    4 bits    2* ...
    >>> race.best("100mbit", within=50.0).method in methods
    True
  """
  where = workers if isinstance(workers, Mesh) else SimComm(axis, members=workers)
  engine = engine_of(where, axis)
  options = {"has_aux": has_aux, "accumulate": accumulate}
  setting = Setting(
    loss_fn, evaluate, where, axis, engine, options, given, rng, model_state
  )
  # Sorted, so that the same rates in another order still match the file.
  config = RaceConfig(
    setting, params, batches, steps, rate, tuple(sorted(map(float, rates))), seeds
  )
  config.check()
  chosen = recipes("adam", workers=engine.workers) if methods is None else methods
  if DENSE not in chosen:
    raise ValueError(
      f"race: methods are {', '.join(map(repr, chosen))}: one has to be 'dense', to compare with"
    )
  links_by_name = _links(links, profile)
  # A file of another race raises before anything is trained.
  kept = _Kept(file, config.key)
  # Dense first: the others train on until they reach its losses.
  in_order = {DENSE: chosen[DENSE]} | chosen
  left_out = kept.add_missing(config, in_order, budget, progress)
  rows = [kept.rows[name] for name in in_order if name in kept.rows]
  sizes = steps, engine.workers, config.key["entries"], rate
  return Race(rows, *sizes, links_by_name, kept.agreements, left_out)


def _links(names: Sequence[str], profile: Profile | None) -> dict[str, Link]:
  """The link of each name, "1gbit" for instance, and the link of the profile, if given, as "profile"."""
  links = {}
  for name in names:
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", name)
    bits = float(matched[1]) * _UNITS[matched[2]] if matched else 0.0
    if not bits:
      raise ValueError(f"race: links has {name!r}, write 10gbit, 100mbit, or the like")
    # β in seconds a byte; γ = 1: transfers do not slow each other down
    links[name] = Link(_ALPHA, 8 / bits, 1.0)
  if profile:
    links["profile"] = Link(profile.alpha, profile.beta, profile.gamma)
  if not links:
    raise ValueError("race: links is empty: give one, or a profile")
  return links


class _Kept:
  """The finished methods of a race, and the agreement of the workers, in a file if there is one.

  Attributes:
    rows: the row of each finished method, by its name.
    agreements: of the workers' gradients in dense training; empty before it.

  Private: `_path` of the file, None for no file; `_key`, the numbers of the race, by
  which a file of another race is refused.
  """

  def __init__(self, file: str | pathlib.Path | None, key: dict[str, Any]):
    # None, or "", for no file
    self._path = file and pathlib.Path(file)
    self._key = key
    self.rows: dict[str, Row] = {}
    self.agreements: list[Agreement] = []
    if not self._path or not self._path.exists():
      return
    read = json.loads(self._path.read_text())
    # Functions and data cannot be compared: the numbers of the race are.
    for name, value in key.items():
      before = read["key"].get(name)
      if before != value:
        raise ValueError(
          f"race: file={str(file)!r} is of a race with {name}={before!r}, this one has {value!r}: choose another file"
        )
    self.rows = {row["method"]: Row(**row) for row in read["rows"]}
    self.agreements = [Agreement(*pair) for pair in read["agreements"]]

  def add_missing(
    self,
    config: RaceConfig,
    methods: dict[str, Method],
    budget: float,
    progress: Callable[[str], object] | None,
  ) -> list[str]:
    """Trains each method that has no row yet; returns the names of those for which no time was left.

    Args:
      config: what the race was asked for.
      methods: by name, dense first, since the others train on until they reach its
        losses.
      budget: seconds after which no method is begun, unless there is no row yet.
      progress: called with a line of text now and then; None calls nothing.
    """
    begin = time.monotonic()
    left_out = []
    for name, method in methods.items():
      if name in self.rows:
        continue
      if self.rows and time.monotonic() - begin > budget:
        left_out.append(name)
        continue
      # A write that fails after the first training would lose it.
      if self._path and not os.access(self._path.parent, os.W_OK):
        raise ValueError(
          f"race: file={str(self._path)!r}: the folder is missing or not writable, make it, or choose another file"
        )
      # Without a row of dense, this is dense; it alone measures agreements.
      row, agreements = config.tune(name, method, self.rows.get(DENSE), progress)
      self.rows[name] = row
      self.agreements = self.agreements or agreements
      # after each method, so that an interrupted race goes on behind it
      self._write()
    return left_out

  def _write(self) -> None:
    """Replaces the file; an interruption leaves the previous file."""
    if not self._path:
      return
    # Agreements are named tuples, which JSON has as lists.
    rows = [row._asdict() for row in self.rows.values()]
    content = {"key": self._key, "rows": rows, "agreements": self.agreements}
    new_file = self._path.with_name(f"{self._path.name}.new")
    # Numbers of numpy and JAX as those of Python.
    new_file.write_text(json.dumps(content, default=operator.methodcaller("item")))
    # A rename is atomic: the file is never half written.
    os.replace(new_file, self._path)

"""Partial reduce between the devices of one process: a thread and a device a worker, for a machine with several GPUs.

The average of a group is a jitted collective over the mesh of the group's devices, which those of other groups take no
part in. The thread whose signal completes a group starts it, and every member goes on with its own device's part:

    thread 0 ── reduce ─> waits ··················· mean on device 0 ─>
    thread 1 ── computes ──────── reduce ─> waits ················          no group of its own yet
    thread 2 ── computes ─ reduce ─> Group(0, 2) ─> mean on device 2 ─>

Each group's program is compiled when it is first needed, or all of them by `warm_up` before training.
"""

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxsparse import _compat
from jaxsparse.flatten import flatten
from jaxsparse.partial.controller import Controller, Group
from jaxsparse.partial.finite import Refusals, check_start

_AXIS = "group"
_SPLIT = PartitionSpec(_AXIS)


class Devices:
  """The workers of one process.

  Args:
    controller: of as many workers as there are devices; nobody else may use it.
    devices: of worker 0, 1, …
    params: the model that training starts from.

  Raises:
    ValueError: for another number of devices than the controller has workers, or parameters that are not finite.

  Example:
    >>> import threading, jax, jax.numpy as jnp, jaxsparse as js
    >>> found = {}
    >>> def train(worker):
    ...   with worker:
    ...     found[worker.number] = worker.reduce(worker.params + worker.number, 1)
    >>> workers = js.partial.Devices(js.partial.Controller(2, 2), jax.devices()[:1] * 2, jnp.zeros(2))
    Traceback (most recent call last):
    ...
    ValueError: 2 workers on 1 different devices: give each worker a device of its own
    >>> if len(jax.devices()) > 1:
    ...   workers = js.partial.Devices(js.partial.Controller(2, 2), jax.devices()[:2], jnp.zeros(2))
    ...   threads = [threading.Thread(target=train, args=(workers.worker(number),)) for number in range(2)]
    ...   for thread in threads: thread.start()
    ...   for thread in threads: thread.join()
    ...   assert found[0][0].tolist() == found[1][0].tolist() == [0.5, 0.5]
  """

  def __init__(self, controller: Controller, devices: Sequence[jax.Device], params: Any):
    if len(set(devices)) != controller.workers:
      different = len(set(devices))
      raise ValueError(
        f"{controller.workers} workers on {different} different devices: give each worker a device of its own"
      )
    check_start(params)
    vector, self._unflatten = flatten(params)
    self.devices, self.params = tuple(devices), params
    self.controller, self._initial = controller, [jax.device_put(vector, device) for device in devices]
    self._changed = threading.Condition()
    self._models: dict[int, tuple[jax.Array, int]] = {}  # of those who wait, and the iteration of each
    self._asking: set[int] = set()  # those whose models are not finite, who wait for another worker's
    self._refusals = [Refusals(worker) for worker in range(controller.workers)]
    self._answers: dict[int, tuple[jax.Array, int] | Exception] = {}
    # XLA's CPU runtime runs the devices of all programs on one small pool of threads: there, one average at a time.
    self._one_at_a_time = threading.Lock() if devices[0].platform == "cpu" else None
    self._program = functools.cache(self._compiled)

  def worker(self, number: int) -> "DeviceWorker":
    """Worker `number`, for a thread of its own.

    Raises:
      ValueError: for a number that is none of a worker.
    """
    if number not in range(len(self.devices)):
      raise ValueError(f"worker {number!r}, choose 0 … {len(self.devices) - 1}")
    return DeviceWorker(self, number)

  def warm_up(self) -> int:
    """Compiles the programs of all groups of P; how many they are."""
    groups = list(itertools.combinations(range(len(self.devices)), self.controller.group_size))
    for members in groups:
      self._program(members)
    return len(groups)

  def average(
    self, number: int, params: Any, iteration: int, signal: Callable[[int, int], list[Group]]
  ) -> tuple[Any, int]:
    """See `DeviceWorker.reduce` and `synchronize`; `signal` is what the controller is told: its `ready` or another."""
    vector = jax.device_put(flatten(params)[0], self.devices[number])
    if vector.size != self._initial[number].size:
      raise ValueError(f"params have {vector.size} entries, those to begin with {self._initial[number].size}")
    if self._refusals[number].refuse(vector, iteration, self._unflatten):
      vector, iteration = self._another_model(number)
      if signal == self.controller.ready:
        return self._unflatten(vector), iteration
    with self._changed:
      groups = signal(number, iteration)
      self._models[number] = (vector, iteration)
      self._give(number)
      ready = self._taken(groups)
    self._average(ready)
    vector, iteration = self._answer(number)
    return self._unflatten(vector), iteration

  def refused(self, number: int) -> int:
    """See `DeviceWorker.refused`."""
    return self._refusals[number].count

  def leave(self, number: int) -> None:
    """See `DeviceWorker.leave`."""
    with self._changed:
      groups = self.controller.leave(number) if number in self.controller.alive else []
      self._give_up_if_nobody()
      ready = self._taken(groups)
    self._average(ready)

  def _answer(self, number: int) -> tuple[jax.Array, int]:
    with self._changed:
      self._changed.wait_for(lambda: number in self._answers)
      answer = self._answers.pop(number)
    if isinstance(answer, Exception):
      raise answer
    return answer

  def _taken(self, groups: list[Group]) -> list[tuple[Group, list[jax.Array]]]:
    return [(group, [self._models.pop(member)[0] for member in group.members]) for group in groups]

  def _another_model(self, number: int) -> tuple[jax.Array, int]:
    """The model of a worker that waits, the most trained one, or else of the next that signals."""
    with self._changed:
      self.controller.replaced(number)
      self._asking.add(number)
      if self._models:
        self._give(max(self._models, key=lambda other: self._models[other][1]))
      self._give_up_if_nobody()
    return self._answer(number)

  def _give(self, number: int) -> None:
    """Copies the model of a worker that waits to those who ask for one."""
    vector, iteration = self._models[number]
    for other in self._asking:
      self._answers[other] = (jax.device_put(vector, self.devices[other]), iteration)
    self._asking.clear()
    self._changed.notify_all()

  def _give_up_if_nobody(self) -> None:
    if self._asking.issuperset(self.controller.alive):
      self._answers.update({other: self._refusals[other].nobody() for other in self._asking})
      self._asking.clear()
      self._changed.notify_all()

  def _average(self, ready: list[tuple[Group, list[jax.Array]]]) -> None:
    for group, models in ready:
      answers: dict[int, tuple[jax.Array, int] | Exception]
      try:
        answers = {member: (mean, group.iteration) for member, mean in self._means(group, models)}
      except Exception as error:  # nobody may wait for ever
        answers = dict.fromkeys(group.members, error)
      with self._changed:
        self._answers.update(answers)
        self._changed.notify_all()

  def _means(self, group: Group, models: list[jax.Array]) -> list[tuple[int, jax.Array]]:
    program, place = self._program(group.members)
    initial = [self._initial[member] for member in group.members]
    joined = lambda parts: jax.make_array_from_single_device_arrays((len(parts) * parts[0].size,), place, parts)
    weights = np.array([(weight, group.initial) for weight in group.weights], np.float32)
    if self._one_at_a_time:
      with self._one_at_a_time:
        means = jax.block_until_ready(program(joined(models), joined(initial), weights))
    else:
      means = program(joined(models), joined(initial), weights)
    of = {shard.device: shard.data for shard in means.addressable_shards}
    return [(member, of[self.devices[member]]) for member in group.members]

  def _compiled(self, members: tuple[int, ...]) -> tuple[Any, NamedSharding]:
    """The program of a group, and where its models lie."""
    mesh = Mesh(np.array([self.devices[member] for member in members]), (_AXIS,))
    place = NamedSharding(mesh, _SPLIT)

    def mean(model: jax.Array, initial: jax.Array, weights: jax.Array) -> jax.Array:
      weight, of_initial = weights[0]
      return jax.lax.psum(weight * model, _AXIS) + of_initial * initial

    mapped = jax.jit(_compat.shard_map(mean, mesh, (_SPLIT, _SPLIT, _SPLIT), _SPLIT), in_shardings=place)
    flat = jax.ShapeDtypeStruct((len(members) * self._initial[0].size,), jnp.float32)
    return mapped.lower(flat, flat, jax.ShapeDtypeStruct((len(members), 2), jnp.float32)).compile(), place


class DeviceWorker:
  """One worker of `Devices`, with the methods of `js.partial.Worker`; it leaves when its `with` block ends.

  Attributes:
    number: of it.
    params: the model that training starts from, on its device.
    iteration: 0.
    device: of it.
    refused: how many models of this worker in succession were not finite; see `reduce`.

  Example:
    >>> import jax.numpy as jnp, jaxsparse as js
    >>> controller = js.partial.Controller(2, 2)
    >>> controller.leave(1)
    []
    >>> if len(jax.devices()) > 1:
    ...   with js.partial.Devices(controller, jax.devices()[:2], jnp.zeros(2)).worker(0) as worker:
    ...     assert worker.reduce(worker.params + 1, 1)[1] == 1
  """

  def __init__(self, workers: Devices, number: int):
    self._workers, self.number, self.device = workers, number, workers.devices[number]
    self.params, self.iteration = jax.device_put(workers.params, self.device), 0

  @property
  def refused(self) -> int:
    """How many models of this worker in succession were not finite; 0 after a finite one."""
    return self._workers.refused(self.number)

  def reduce(self, params: Any, iteration: int) -> tuple[Any, int]:
    """Averages with a group, as `js.partial.Worker.reduce` does; parameters stay on this worker's device.

    In place of parameters that are not finite it returns the model of a worker that waits, or of the next that signals.

    Raises:
      Rejected: for an iteration that the controller does not take.
      ValueError: for parameters of another size.
      FloatingPointError: as `js.partial.Worker.reduce`.
    """
    return self._workers.average(self.number, params, iteration, self._workers.controller.ready)

  def synchronize(self, params: Any, iteration: int) -> tuple[Any, int]:
    """Averages with all workers that have not left, as `js.partial.Worker.synchronize` does."""
    return self._workers.average(self.number, params, iteration, self._workers.controller.synchronize)

  def leave(self) -> None:
    """Ends taking part; the others go on without this worker."""
    self._workers.leave(self.number)

  def __enter__(self) -> Self:
    """The worker."""
    return self

  def __exit__(self, *_: object) -> None:
    """Leaves."""
    self.leave()

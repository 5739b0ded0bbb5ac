"""Partial reduce between the devices of one process, for a host with several GPUs: a thread and a device a worker.

The average of a group is a jitted collective over the mesh of the group's devices; devices of other groups take no
part. The thread whose signal completes a group starts the collective, and every member continues with its own device's
shard:

    thread 0 ── reduce ─> waits ··················· mean on device 0 ─>
    thread 1 ── computes ──────── reduce ─> waits ················          no group yet
    thread 2 ── computes ─ reduce ─> Group(0, 2) ─> mean on device 2 ─>

The program of a group is compiled at its first use, or by `warm_up` before training.
"""

import functools
import itertools
import threading
import time
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
_LEAST_PATIENCE = 0.1  # seconds that the group filter may let a worker wait, or as long as its step took


class Devices:
  """The workers of one process.

  Args:
    controller: with as many workers as there are devices; used by nothing else.
    devices: worker i uses devices[i].
    params: the model that training starts from.

  Raises:
    ValueError: if the number of devices differs from the controller's number of workers, or `params` is not finite.

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
    self._models: dict[int, tuple[jax.Array, int]] = {}  # model and iteration of each worker that waits for its group
    self._seeking: set[int] = set()  # workers whose models are not finite, and that wait for another worker's model
    self._refusals = [Refusals(worker) for worker in range(controller.workers)]
    self._answers: dict[int, tuple[jax.Array, int] | Exception] = {}
    self._step_began = [time.monotonic()] * controller.workers
    # XLA's CPU runtime runs all programs on one small thread pool, where two collectives at once could deadlock.
    self._one_at_a_time = threading.Lock() if devices[0].platform == "cpu" else None
    self._program = functools.cache(self._compiled)

  def worker(self, number: int) -> "DeviceWorker":
    """Returns worker `number`, for a thread of its own.

    Raises:
      ValueError: for a number outside 0 … N − 1.
    """
    if number not in range(len(self.devices)):
      raise ValueError(f"worker {number!r}, choose 0 … {len(self.devices) - 1}")
    return DeviceWorker(self, number)

  def warm_up(self) -> int:
    """Compiles the programs of all groups of P workers; returns how many they are."""
    groups = list(itertools.combinations(range(len(self.devices)), self.controller.group_size))
    for members in groups:
      self._program(members)
    return len(groups)

  def average(
    self, number: int, params: Any, iteration: int, signal: Callable[[int, int], list[Group]]
  ) -> tuple[Any, int]:
    """See `DeviceWorker.reduce` and `synchronize`; `signal` is the controller's `ready` or `synchronize`."""
    vector = jax.device_put(flatten(params)[0], self.devices[number])
    if vector.size != self._initial[number].size:
      raise ValueError(f"params have {vector.size} entries, the initial ones have {self._initial[number].size}")
    if self._refusals[number].refuse(vector, iteration, self._unflatten):
      vector, iteration = self._another_model(number)
      if signal == self.controller.ready:
        return self._unflatten(vector), iteration
    took = time.monotonic() - self._step_began[number]
    with self._changed:
      groups = signal(number, iteration)
      self._models[number] = (vector, iteration)
      self._hand_out(number)
      ready = self._collect(groups)
    self._average(ready)
    vector, iteration = self._wait_for_answer(number, max(took, _LEAST_PATIENCE))
    self._step_began[number] = time.monotonic()
    return self._unflatten(vector), iteration

  def refused(self, number: int) -> int:
    """See `DeviceWorker.refused`."""
    return self._refusals[number].count

  def leave(self, number: int) -> None:
    """See `DeviceWorker.leave`."""
    with self._changed:
      groups = self.controller.leave(number) if number in self.controller.alive else []
      self._fail_if_all_seek()
      ready = self._collect(groups)
    self._average(ready)

  def _wait_for_answer(self, number: int, patience: float | None = None) -> tuple[jax.Array, int]:
    """The answer to a worker; each time that it has waited for `patience` seconds, ready workers are released."""
    while True:
      with self._changed:
        if self._changed.wait_for(lambda: number in self._answers, patience):
          answer = self._answers.pop(number)
          break
        ready = self._collect(self.controller.release())
      self._average(ready)
    if isinstance(answer, Exception):
      raise answer
    return answer

  def _collect(self, groups: list[Group]) -> list[tuple[Group, list[jax.Array]]]:
    return [(group, [self._models.pop(member)[0] for member in group.members]) for group in groups]

  def _another_model(self, number: int) -> tuple[jax.Array, int]:
    """The most trained model of the workers that wait; if none waits, that of the next worker to signal."""
    with self._changed:
      self.controller.replaced(number)
      self._seeking.add(number)
      if self._models:
        self._hand_out(max(self._models, key=lambda other: self._models[other][1]))
      self._fail_if_all_seek()
    return self._wait_for_answer(number)

  def _hand_out(self, number: int) -> None:
    """Copies the model of a waiting worker to all workers that seek one."""
    vector, iteration = self._models[number]
    for other in self._seeking:
      self._answers[other] = (jax.device_put(vector, self.devices[other]), iteration)
    self._seeking.clear()
    self._changed.notify_all()

  def _fail_if_all_seek(self) -> None:
    if self._seeking.issuperset(self.controller.alive):
      self._answers.update({other: self._refusals[other].no_donor() for other in self._seeking})
      self._seeking.clear()
      self._changed.notify_all()

  def _average(self, ready: list[tuple[Group, list[jax.Array]]]) -> None:
    for group, models in ready:
      answers: dict[int, tuple[jax.Array, int] | Exception]
      try:
        answers = {member: (mean, group.iteration) for member, mean in self._means(group, models)}
      except Exception as error:  # raised in every member, or they would wait for ever
        answers = dict.fromkeys(group.members, error)
      with self._changed:
        self._answers.update(answers)
        self._changed.notify_all()

  def _means(self, group: Group, models: list[jax.Array]) -> list[tuple[int, jax.Array]]:
    program, sharding = self._program(group.members)
    initial = [self._initial[member] for member in group.members]
    joined = lambda parts: jax.make_array_from_single_device_arrays((len(parts) * parts[0].size,), sharding, parts)
    weights = np.array([(weight, group.initial) for weight in group.weights], np.float32)
    if self._one_at_a_time:
      with self._one_at_a_time:
        means = jax.block_until_ready(program(joined(models), joined(initial), weights))
    else:
      means = program(joined(models), joined(initial), weights)
    of = {shard.device: shard.data for shard in means.addressable_shards}
    return [(member, of[self.devices[member]]) for member in group.members]

  def _compiled(self, members: tuple[int, ...]) -> tuple[Any, NamedSharding]:
    """The compiled average of a group, and the sharding of its models."""
    mesh = Mesh(np.array([self.devices[member] for member in members]), (_AXIS,))
    sharding = NamedSharding(mesh, _SPLIT)

    def mean(model: jax.Array, initial: jax.Array, weights: jax.Array) -> jax.Array:
      weight, of_initial = weights[0]
      return jax.lax.psum(weight * model, _AXIS) + of_initial * initial

    mapped = jax.jit(_compat.shard_map(mean, mesh, (_SPLIT, _SPLIT, _SPLIT), _SPLIT), in_shardings=sharding)
    flat = jax.ShapeDtypeStruct((len(members) * self._initial[0].size,), jnp.float32)
    return mapped.lower(flat, flat, jax.ShapeDtypeStruct((len(members), 2), jnp.float32)).compile(), sharding


class DeviceWorker:
  """One worker of `Devices`, with the methods of `js.partial.Worker`; it leaves when its `with` block ends.

  Attributes:
    number: this worker's.
    params: the model that training starts from, on this worker's device.
    iteration: 0.
    device: this worker's.
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

    If `params` is not finite, the result is the model of another worker: one that waits, or the next one that signals.

    Raises:
      Rejected: for an iteration that the controller rejects.
      ValueError: for parameters of another size.
      FloatingPointError: as `js.partial.Worker.reduce`.
    """
    return self._workers.average(self.number, params, iteration, self._workers.controller.ready)

  def synchronize(self, params: Any, iteration: int) -> tuple[Any, int]:
    """Averages with all workers that have not left, as `js.partial.Worker.synchronize` does."""
    return self._workers.average(self.number, params, iteration, self._workers.controller.synchronize)

  def leave(self) -> None:
    """Leaves: the other workers continue without this one."""
    self._workers.leave(self.number)

  def __enter__(self) -> Self:
    """The worker."""
    return self

  def __exit__(self, *_: object) -> None:
    """Leaves."""
    self.leave()

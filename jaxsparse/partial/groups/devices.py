"""Partial reduce between the devices of one process, for a host with several GPUs: a thread and a device a worker.

The average of a group is a jitted collective over the mesh of the group's devices;
devices of other groups take no part. The thread whose signal completes a group starts
the collective, and every member continues with its own device's shard:

    thread 0 ── reduce ─> waits ··················· mean on device 0 ─>
    thread 1 ── computes ──────── reduce ─> waits ················          no group yet
    thread 2 ── computes ─ reduce ─> WorkerGroup(0, 2) ─> mean on device 2 ─>

The program of a group is compiled at its first use, or by `warm_up` before training.

The state of `Devices` that `_lock` guards, with the controller, by worker:

    _waiting   model f32[n] on its device, iteration, and future of the answer: it waits for a group
    _seeking   future of the answer: its model was not finite, and it waits for the model of another worker
"""

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Sequence
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxsparse import _compat
from jaxsparse.arrays.flatten import flatten
from jaxsparse.partial.groups.base import BaseWorker
from jaxsparse.partial.groups.controller import Controller
from jaxsparse.partial.net.alike import check_start
from jaxsparse.partial.net.messages import WorkerGroup, WorkerMessage

_AXIS = "group"
_SPLIT = PartitionSpec(_AXIS)
# seconds for which a ready worker waits for the group filter, if its last step was
# shorter; else as long as that step took
_LEAST_PATIENCE = 0.1
_Model = tuple[jax.Array, int]  # f32[n], and the iterations it has been trained for


class Devices:
  """The workers of one process.

  Args:
    controller: with as many workers as there are devices; used by nothing else.
    devices: worker i uses devices[i].
    params: the model that training starts from.

  Raises:
    ValueError: if the number of devices differs from the controller's number of
      workers, or `params` is not finite.

  Example:
    >>> import threading, jax, jax.numpy as jnp, jaxsparse as js
    >>> averages = {}
    >>> def train(worker):
    ...   with worker:
    ...     averages[worker.number] = worker.reduce(worker.params + worker.number, 1)
    >>> workers = js.partial.Devices(js.partial.Controller(2, 2), jax.devices()[:1] * 2, jnp.zeros(2))
    Traceback (most recent call last):
    ...
    ValueError: 2 workers, 2 devices, 1 different ones: give each worker one
    >>> if len(jax.devices()) > 1:
    ...   workers = js.partial.Devices(js.partial.Controller(2, 2), jax.devices()[:2], jnp.zeros(2))
    ...   threads = [threading.Thread(target=train, args=(workers.worker(number),)) for number in range(2)]
    ...   for thread in threads: thread.start()
    ...   for thread in threads: thread.join()
    ...   assert averages[0][0].tolist() == averages[1][0].tolist() == [0.5, 0.5]
  """

  def __init__(
    self, controller: Controller, devices: Sequence[jax.Device], params: optax.Params
  ):
    different = len(set(devices))
    if not len(devices) == different == controller.workers:
      raise ValueError(
        f"{controller.workers} workers, {len(devices)} devices, {different} different ones: give each worker one"
      )
    check_start(params)
    vector, self.unflatten = flatten(params)
    self.controller = controller
    self.devices = tuple(devices)
    self.params = params
    self._initial = [jax.device_put(vector, device) for device in devices]
    self._lock = threading.Lock()  # guards the controller, `_waiting` and `_seeking`
    self._waiting: dict[
      int, tuple[jax.Array, int, futures.Future]
    ] = {}  # for a group: model, iteration, and answer
    self._seeking: dict[
      int, futures.Future
    ] = {}  # answers of workers that wait for the model of another worker
    # None where groups may average at once. XLA's CPU runtime runs all programs on one
    # small thread pool, where two collectives at once could deadlock.
    self._one_at_a_time = threading.Lock() if devices[0].platform == "cpu" else None
    # by the members of a group: its compiled average, and the sharding of its models
    self._program = functools.cache(self._compile)

  def worker(self, number: int) -> "DeviceWorker":
    """Returns worker `number`, for a thread of its own.

    Raises:
      ValueError: for a number outside 0 … N − 1.
    """
    if number not in range(len(self.devices)):
      raise ValueError(f"worker {number!r}, choose 0 … {len(self.devices) - 1}")
    return DeviceWorker(self, number)

  def warm_up(self) -> int:
    """Compiles the programs of all groups of P workers; returns the number of these groups."""
    groups = list(
      itertools.combinations(range(len(self.devices)), self.controller.group_size)
    )
    for members in groups:
      self._program(members)
    return len(groups)

  def _ask(
    self, worker: int, kind: WorkerMessage, model: _Model, patience: float | None
  ) -> _Model:
    """Blocks until a worker's signal is answered; returns a model f32[n] and its iteration.

    The thread whose signal completes a group computes the average, and answers all
    members.

    Args:
      worker: number of the worker whose thread this is.
      kind: READY, SYNCHRONIZE or NOT_FINITE.
      model: of this worker; not used for NOT_FINITE.
      patience: seconds after which, again and again, the group filter stops waiting for
        workers that are not ready (`Controller.release`); None for never.
    """
    answer = futures.Future[_Model]()
    groups = list[WorkerGroup]()
    (vector, iteration) = model
    with self._lock:
      if kind == WorkerMessage.NOT_FINITE:
        # forgets the worker's iteration: that of the model it gets may be smaller
        self.controller.replaced(worker)
        self._seeking[worker] = answer
      else:
        groups = (
          self.controller.ready
          if kind == WorkerMessage.READY
          else self.controller.synchronize
        )(worker, iteration)
        self._waiting[worker] = (
          jax.device_put(vector, self.devices[worker]),
          iteration,
          answer,
        )
      # This worker's model may serve seekers, or now all workers seek one.
      self._answer_seekers()
    # without the lock, so that other threads can signal meanwhile
    self._average(groups)
    while not futures.wait([answer], patience).done:
      with self._lock:
        groups = self.controller.release()
      self._average(groups)
    return answer.result()

  def _leave(self, worker: int) -> None:
    """Continues without a worker."""
    with self._lock:
      groups = self.controller.leave(worker) if worker in self.controller.alive else []
      self._answer_seekers()
    self._average(groups)

  def _answer_seekers(self) -> None:
    """Answers workers in `_seeking` with the most trained model in `_waiting`; with an error if all workers seek."""
    # If all workers seek, none has a finite model.
    all_seek = self._seeking.keys() >= set(self.controller.alive)
    while self._seeking and (self._waiting or all_seek):
      worker, answer = self._seeking.popitem()
      if self._waiting:
        vector, iteration, _ = max(
          self._waiting.values(), key=lambda waiting: waiting[1]
        )
        answer.set_result((jax.device_put(vector, self.devices[worker]), iteration))
      else:
        # `BaseWorker._replace` catches it, and raises one with a message.
        answer.set_exception(FloatingPointError())

  def _average(self, groups: list[WorkerGroup]) -> None:
    """Averages the models of each group, and answers its members with the mean, or the error."""
    for group in groups:
      with self._lock:
        models, _, answers = zip(
          *(self._waiting.pop(member) for member in group.members), strict=True
        )
      try:
        means = self._means(group, models)
        for member, answer in zip(group.members, answers, strict=True):
          answer.set_result((means[self.devices[member]], group.iteration))
      except Exception as error:  # raised in every member, or they would wait for ever
        for answer in answers:
          answer.set_exception(error)

  def _means(
    self, group: WorkerGroup, models: Sequence[jax.Array]
  ) -> dict[jax.Device, jax.Array]:
    """The average f32[n] at each device of a group, from the models f32[n] of its members on their devices."""
    program, sharding = self._program(group.members)
    initial = [self._initial[member] for member in group.members]
    # f32[G n] of G arrays f32[n], each of which stays on its device
    joined = lambda parts: jax.make_array_from_single_device_arrays(
      (len(parts) * parts[0].size,), sharding, parts
    )
    # f32[G, 2]: for each member the weights of its model and of the initial one
    weights = np.array(
      [(weight, group.initial) for weight in group.weights], np.float32
    )
    # On CPU one collective runs to its end before the next one starts, or both could
    # deadlock; on GPU `_one_at_a_time` is None.
    with self._one_at_a_time or contextlib.nullcontext():
      means = program(joined(models), joined(initial), weights)
      if self._one_at_a_time:
        means.block_until_ready()
    return {shard.device: shard.data for shard in means.addressable_shards}

  def _compile(self, members: tuple[int, ...]) -> tuple[Any, NamedSharding]:
    """Compiles the average of a group of G members.

    Returns:
      The program, from models f32[G n], initial models f32[G n] and weights f32[G, 2]
      to means f32[G n]; and the sharding of all four: the first axis over the devices.
    """
    mesh = Mesh(np.array([self.devices[member] for member in members]), (_AXIS,))
    sharding = NamedSharding(mesh, _SPLIT)

    def mean(model: jax.Array, initial: jax.Array, weights: jax.Array) -> jax.Array:
      # `weights` is split over the group: each device has one row.
      weight, of_initial = weights[0]
      return jax.lax.psum(weight * model, _AXIS) + of_initial * initial

    mapped = jax.jit(
      _compat.shard_map(mean, mesh, (_SPLIT, _SPLIT, _SPLIT), _SPLIT),
      in_shardings=sharding,
    )
    flat = jax.ShapeDtypeStruct((len(members) * self._initial[0].size,), jnp.float32)
    return mapped.lower(
      flat, flat, jax.ShapeDtypeStruct((len(members), 2), jnp.float32)
    ).compile(), sharding


class DeviceWorker(BaseWorker):
  """One worker of `Devices`, with the methods of `js.partial.Worker`.

  Attributes:
    number: this worker's.
    params: the model that training starts from, on this worker's device.
    iteration: 0, the iterations of `params`.
    device: this worker's.
    _step_began: when the local step began that the next call ends.
  """

  def __init__(self, workers: Devices, worker: int):
    super().__init__(worker, workers.params, workers.unflatten)
    self._workers = workers
    self.device = workers.devices[worker]
    self.params = jax.device_put(workers.params, self.device)
    self.iteration = 0
    self._step_began = time.monotonic()

  def leave(self) -> None:
    """Leaves: the other workers continue without this one."""
    self._workers._leave(self.number)

  def _ask(self, kind: WorkerMessage, vector: jax.Array, iteration: int) -> _Model:
    # The filter waits for other workers for as long as this one's step took. NOT_FINITE
    # (None) is in no queue, so nobody has to be released for it.
    took = max(time.monotonic() - self._step_began, _LEAST_PATIENCE)
    model = self._workers._ask(
      self.number,
      kind,
      (vector, iteration),
      None if kind == WorkerMessage.NOT_FINITE else took,
    )
    self._step_began = time.monotonic()
    return model

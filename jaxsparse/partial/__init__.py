"""Partial reduce: data-parallel training that does not wait for stragglers (Miao et al., SIGMOD 2021).

An all-reduce in every step makes all workers as slow as the slowest. In partial reduce each worker trains a model of
its own at its own pace. After a step it sends a signal, "ready", to a controller. As soon as P workers are ready (P <
N), the controller makes a group of them; the group averages its models, while the other workers keep computing. Groups
change all the time, so every worker's progress reaches every other worker after a few averages.

Forming groups:

    controller         `Controller`, a pure state machine: ready signals in, groups out
    weights            the weight of each model in an average

Workers in processes, on any number of hosts:

    server             `Server`, the controller over TCP; server_protocol is its pure part
    worker             `Worker`: trains, and averages with groups; no crash of another worker holds it up
    worker_protocol    the pure part of a worker, with its events and actions (events); runtime owns thread and sockets
    exchange, early    the average of a group as messages between its members; messages that arrive too early
    messages, peers    the messages to and from the server; those between workers
    saving             `restore`: a worker saves its parameters if the controller is lost

Workers in threads of one process:

    devices            `Devices`: one device for each worker, averages are JAX collectives

In both a model with NaN or Inf enters no average (finite).
"""

from jaxsparse.partial.controller import Controller
from jaxsparse.partial.devices import Devices
from jaxsparse.partial.messages import Keys, make_keys, read_keys, write_keys
from jaxsparse.partial.runtime import ControllerLost
from jaxsparse.partial.saving import restore
from jaxsparse.partial.server import Server
from jaxsparse.partial.worker import Worker

__all__ = [
  "Controller",
  "ControllerLost",
  "Devices",
  "Keys",
  "Server",
  "Worker",
  "make_keys",
  "read_keys",
  "restore",
  "write_keys",
]

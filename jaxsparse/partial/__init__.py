"""Partial reduce: data-parallel training that does not wait for stragglers (Miao et al., SIGMOD 2021).

An all-reduce in every step makes all workers as slow as the slowest. In partial reduce each worker trains a model of
its own at its own pace. After a step it sends a signal, "ready", to a controller. As soon as P workers are ready (P <
N), the controller makes a group of them; the group averages its models, while the other workers keep computing. Groups
change all the time, so every worker's progress reaches every other worker after a few averages.

    controller         `Controller`, a pure state machine: ready signals in, groups and weights out
    server             `Server`, the controller over TCP
    worker             `Worker`, in a process on any host: trains, and averages with groups; others may crash
    worker_protocol    its decisions, a pure state machine; exchange: the average of a group as messages
    messages, sockets  messages as bytes; ZeroMQ and `Keys`, with the extra `jaxsparse[partial]`
    saving             `restore`: a worker saves its parameters if the controller is lost
    devices            `Devices`: workers in threads of one process, a device each; averages are JAX collectives
    base               what all workers share; a model with NaN or Inf enters no average
"""

from jaxsparse.partial.controller import Controller
from jaxsparse.partial.devices import Devices
from jaxsparse.partial.quorum import Quorum
from jaxsparse.partial.rounds import Rounds
from jaxsparse.partial.saving import restore
from jaxsparse.partial.server import Server
from jaxsparse.partial.sockets import Keys
from jaxsparse.partial.worker import ControllerLost, Worker

__all__ = ["Controller", "ControllerLost", "Devices", "Keys", "Quorum", "Rounds", "Server", "Worker", "restore"]

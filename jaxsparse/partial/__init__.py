"""Partial reduce: data-parallel training that does not wait for stragglers (Miao et al., SIGMOD 2021).

Each worker trains a model of its own at its own pace. After a step it tells a controller that it is ready; of those
ready the controller makes groups of P, and a group averages its models while all others go on.

Controller              who averages with whom, a pure state machine (controller, graph, weights)
rho                     how fast the groups of a history spread what each worker learns (mixing)
simulate                this and what it is compared with, in virtual time (simulation, methods, clock)
Server                  the controller over TCP (server, messages)
Worker                  a process that trains and averages with groups, whoever dies (worker, talk, peers, exchange)
restore                 what a worker saved when the controller died (saving)
Devices                 threads of one process instead, a device each (devices)

A model with NaN or Inf is in no average of any of these (finite).
"""

from jaxsparse.partial.clock import Span, sharing
from jaxsparse.partial.controller import Controller, Group, Rejected
from jaxsparse.partial.devices import Devices, DeviceWorker
from jaxsparse.partial.messages import Keys, make_keys, read_keys, write_keys
from jaxsparse.partial.mixing import mixing, rho
from jaxsparse.partial.runtime import ControllerLost
from jaxsparse.partial.saving import restore
from jaxsparse.partial.server import Server
from jaxsparse.partial.simulation import Simulation, simulate
from jaxsparse.partial.worker import Worker

__all__ = [
  "Controller",
  "ControllerLost",
  "DeviceWorker",
  "Devices",
  "Group",
  "Keys",
  "Rejected",
  "Server",
  "Simulation",
  "Span",
  "Worker",
  "make_keys",
  "mixing",
  "read_keys",
  "restore",
  "rho",
  "sharing",
  "simulate",
  "write_keys",
]

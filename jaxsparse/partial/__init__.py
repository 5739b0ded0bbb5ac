"""Training with the workers that are there: partial reduce (Miao et al., SIGMOD 2021), and rounds of local steps.

Each worker trains a model of its own at its own pace, in a process that sends messages
to a server and to other workers. The server says who exchanges with whom, and no model
passes through it.

Partial reduce: as soon as P of N workers are ready, they average their models, while
the others keep computing. Groups change all the time, so every worker's progress
reaches every other worker after a few averages.

Rounds: workers exchange what they have moved from a common anchor with those that are
there, by any collective, and all have the same anchor afterwards.

                      partial reduce, groups/                      rounds/
    worker            worker: `Worker`; devices: `Devices`         worker: `Rounds`
    its decisions     protocol, a state machine                    protocol, a state machine
    what is computed  average: sums as messages, or collectives    exchanger, outer_step: an optax chain
    its state         protocol: `Model`                            anchor: outer parameters, round, residual
    server            server                                       server
    its decisions     controller: `Controller`                     quorum: `Quorum`, pairs that miss messages
    readers                                                          follower; chain: the last rounds as links
    besides           base: NaN enters no average; saving          moving, checks: what was moved, saved states
    of processes                                                   slices, parts, processes

Neither has anything to do with the other. Both have these parts, net/:

    membership   who is there: HELLO, heartbeats, donors; `Membership` of a worker, `Members` of a server
    endpoint     the thread and the sockets of a worker in a process of its own
    messages     signals, answers and pieces as bytes
    sockets      ZeroMQ, and `Keys`; with pyzmq
    alike        what training may start from

`Server` serves either of them over TCP.
"""

from jaxsparse.partial.groups.controller import Controller
from jaxsparse.partial.groups.convergence import convergence_condition
from jaxsparse.partial.groups.devices import Devices
from jaxsparse.partial.groups.saving import restore
from jaxsparse.partial.groups.worker import Worker
from jaxsparse.partial.net.endpoint import ControllerLost
from jaxsparse.partial.net.sockets import Keys
from jaxsparse.partial.rounds.follower import Follower
from jaxsparse.partial.rounds.quorum import Quorum
from jaxsparse.partial.rounds.worker import Rounds
from jaxsparse.partial.server import Server

__all__ = [
  "Controller",
  "ControllerLost",
  "Devices",
  "Follower",
  "Keys",
  "Quorum",
  "Rounds",
  "Server",
  "Worker",
  "convergence_condition",
  "restore",
]

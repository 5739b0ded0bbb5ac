"""Training with the workers that are there: partial reduce (Miao et al., SIGMOD 2021), and rounds of local steps.

Each worker trains a model of its own at its own pace, in a process that sends messages to a server and to other
workers. The server says who exchanges with whom, and no model passes through it.

Partial reduce: as soon as P of N workers are ready, they average their models, while the others keep computing. Groups
change all the time, so every worker's progress reaches every other worker after a few averages.

Rounds: workers exchange what they have moved from a common anchor with those that are there, by any collective, and all
have the same anchor afterwards.

                      partial reduce                         rounds
    who               `Controller`, pure state machines      `Quorum`
    server            `Server`, over TCP, with the decisions of
                      server_protocol                        round_server
    worker            `Worker`                               `Rounds`
    its decisions     worker_protocol                        round_protocol
    what is computed  exchange: an average as messages       exchanger, outer_step: an optax chain

    endpoint, messages, sockets   thread and sockets of a worker, messages as bytes, ZeroMQ and `Keys`; with pyzmq
    base, saving                  models with NaN or Inf enter no average; `restore`: after the server was lost
    devices                       `Devices`: partial reduce in threads of one process, averages are JAX collectives
"""

from jaxsparse.partial.groups.controller import Controller
from jaxsparse.partial.groups.devices import Devices
from jaxsparse.partial.groups.saving import restore
from jaxsparse.partial.groups.worker import Worker
from jaxsparse.partial.net.endpoint import ControllerLost
from jaxsparse.partial.net.sockets import Keys
from jaxsparse.partial.rounds.quorum import Quorum
from jaxsparse.partial.rounds.worker import Rounds
from jaxsparse.partial.server import Server

__all__ = ["Controller", "ControllerLost", "Devices", "Keys", "Quorum", "Rounds", "Server", "Worker", "restore"]

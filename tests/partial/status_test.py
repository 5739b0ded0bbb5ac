"""What a server of rounds says of its run: to people, and to Prometheus."""

import re

import jax.numpy as jnp
import optax
import pytest

import jaxsparse as js
from jaxsparse.partial import __main__ as command
from jaxsparse.partial.net import messages
from jaxsparse.partial.net.alike import Alike
from jaxsparse.partial.net.membership import Members
from jaxsparse.partial.net.messages import (
  RoundPosition,
  ServerMessage,
  Signal,
  WorkerMessage,
)
from jaxsparse.partial.rounds import status
from jaxsparse.partial.rounds.server import RoundMember, RoundServer


def dense(comm):
  return optax.chain(js.dense_transform(comm), optax.sgd(1.0))


COUNTS = (
  "round",
  "since",
  "seconds",
  "rounds_counted",
  "rounds_failed",
  "steps_delivered",
  "steps_lost",
)


class Hub:
  """A server whose last answer to each connection is kept."""

  def __init__(self, workers=3, quorum=2):
    members = Members(RoundMember, self.send, limit=5.0, now=0.0)
    self.server = RoundServer(
      js.partial.Quorum(workers, quorum=quorum, grace=1.0, first=0), members
    )
    self.answers = {}

  def send(self, connection, frame):
    self.answers[connection] = messages.parse_answer(frame)
    return True

  def tell(self, kind, worker, value=0, now=0.0, connection=None, **facts):
    frame = Signal(kind, worker, value, **facts).pack()
    self.server.receive(connection or b"%d" % worker, [frame], now)


def test_a_link_is_shown_as_one_once_it_has_moved_something():
  hub = Hub()
  for worker in range(2):
    address = f"tcp://h:{worker + 1}"
    hub.tell(WorkerMessage.HELLO, worker, address=address, alike=Alike.of(jnp.zeros(2)))
  hub.server.tick(6.0)
  for kind, worker in ((WorkerMessage.LINK, 0), (WorkerMessage.READY, 1)):
    hub.tell(WorkerMessage.BEAT, worker, now=6.0)
    hub.tell(kind, worker, 1, now=6.0)
  for worker in range(2):
    hub.tell(WorkerMessage.DONE, worker, 1, now=6.5)
  found = hub.server.status()
  shown = [(worker["link"], worker["doing"]) for worker in found["workers"]]
  assert shown == [(True, "waits for its groups"), (False, "trains")]
  hub.tell(WorkerMessage.LINK, 0, 1, now=7.0, position=hub.server._quorum.position)
  *_, link, _ = status.describe(hub.server.status()).splitlines()
  assert re.match(r"0 +yes +waits for others ", link)


def test_each_worker_is_shown_with_what_it_does_and_rounds_with_what_they_delivered():
  hub = Hub()
  for worker in range(3):
    hub.tell(
      WorkerMessage.HELLO,
      worker,
      address=f"tcp://h:{worker + 1}",
      alike=Alike.of(jnp.zeros(2)),
    )
  for worker in range(2):
    hub.tell(WorkerMessage.READY, worker, 1, now=2.0, delivers=4)
  assert [worker["doing"] for worker in hub.server.status()["workers"]] == [
    "waits for others"
  ] * 2 + ["trains"]
  hub.server.tick(3.5)
  assert [worker["doing"] for worker in hub.server.status()["workers"]] == [
    "exchanges",
    "exchanges",
    "trains",
  ]
  for worker in range(2):
    hub.tell(WorkerMessage.DONE, worker, 1, digest=7, now=4.0)
  hub.tell(WorkerMessage.READY, 2, 1, now=4.5)  # its anchor is that of the start
  hub.tell(WorkerMessage.BEAT, 2, 12, now=4.5)
  hub.server.tick(4.75)
  found = hub.server.status()
  assert {name: found[name] for name in COUNTS} == {
    "round": 1, "since": 0.75, "seconds": None, "rounds_counted": 1, "rounds_failed": 0, "steps_delivered": 8,
    "steps_lost": 0,
  }  # fmt: skip
  late = {
    "worker": 2,
    "doing": "fetches the anchor",
    "round": 0,
    "base": 0,
    "undelivered": 12,
    "silent": 0.25,
  }
  assert found["workers"][2] == late | {
    "limit": 5.0,
    "link": False,
    "address": "tcp://h:3",
  }
  hub.tell(WorkerMessage.READY, 0, 1, now=5.0, position=RoundPosition(1, 1))
  hub.tell(WorkerMessage.READY, 1, 1, now=5.0, position=RoundPosition(1, 1))
  hub.server.tick(6.5)
  hub.tell(WorkerMessage.FAILED, 0, 2, missing=1, now=6.6)
  assert hub.server.status()["rounds_failed"] == 1


def test_who_asks_is_no_worker():
  """A worker that has died is dropped, however often others ask."""
  hub = Hub()
  hub.tell(WorkerMessage.HELLO, 0, address="tcp://h:1", alike=Alike.of(jnp.zeros(2)))
  for now in range(1, 5):
    hub.server.tick(float(now))
    hub.tell(WorkerMessage.STATUS, 0, now=float(now), connection=b"stranger")
  assert hub.answers[b"stranger"].kind == ServerMessage.STATUS
  assert hub.server.status()["workers"][0]["silent"] == 4.0
  hub.server.tick(5.5)
  assert hub.server.status()["workers"] == []


def test_over_sockets_as_text_and_as_numbers(capsys, monkeypatch, tmp_path):
  run, _, own = js.partial.Keys.make_own(2)
  own.write(tmp_path / "server")
  run.write(tmp_path / "0")
  with js.partial.Server(js.partial.Quorum(2, quorum=1), keys=own) as serving:
    monkeypatch.setattr(status, "_TIMEOUT", 0.3)
    with pytest.raises(TimeoutError, match="has it these keys"):
      status.ask(serving.address, js.partial.Keys.make())
    monkeypatch.setattr(status, "_TIMEOUT", 30.0)
    with js.partial.Rounds(
      serving.address, 0, jnp.zeros(3), dense, every=2, keys=run
    ) as worker:
      params = worker.params
      while worker.round < 3:
        params = worker.step(params + 1)
      monkeypatch.setattr(
        "sys.argv", ["partial", "status", serving.address, f"--keys={tmp_path / '0'}"]
      )
      command.main()
      shown = capsys.readouterr().out
      assert re.search(
        r"round \d+, ended [\d.]+ s ago, one every [\d.]+ s; \d+ counted and 0 failed",
        shown,
      )
      assert re.search(
        r"^0 +(trains|exchanges|waits for others) +\d+ +\d+ +[\d.]+ s +5\.0 s +tcp://127",
        shown,
        re.MULTILINE,
      )
      found = status.ask(serving.address, run)
  assert found["rounds_counted"] >= 3
  assert 3 <= found["workers"][0]["round"] <= found["round"]


@pytest.mark.parametrize("fragments", [1, 2])
def test_each_step_is_counted_as_delivered_once(fragments):
  """Also where rounds follow each other faster than heartbeats, and where a round delivers a fragment of two."""
  with (
    js.partial.Server(js.partial.Quorum(1, quorum=1)) as server,
    js.partial.Rounds(
      *(server.address, 0, {"a": jnp.zeros(3), "b": jnp.zeros(3)}, dense),
      every=4,
      fragments=fragments,
      wait=20.0,
    ) as worker,
  ):
    params = worker.params
    for _ in range(12):
      params = worker.step(params, weight=10)
    left = int(worker.state["trained"][:, 0].max())
    assert status.ask(server.address)["steps_delivered"] == 120 - left


def test_a_server_of_partial_reduce_and_nobody():
  with (
    js.partial.Server(js.partial.Controller(2, 2)) as server,
    pytest.raises(ValueError, match="is not the server of"),
  ):
    status.ask(server.address)
  with pytest.raises(ValueError, match="choose tcp://HOST:PORT"):
    status.ask("127.0.0.1:2900")

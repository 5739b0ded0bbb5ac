"""Figures of communication schedules, drawn from the messages that the collectives really send.

A collective runs in the simulator, on gradients whose values name the worker and the
block: entry b of worker w is 2^w + b · 2^P. So the numbers in a message tell which
blocks it carries, and which workers' gradients they sum up. No schedule is written down
a second time here.

Each row of a figure shows what all workers hold, a cell for each block; an arrow is one
message, below its sender the blocks that it carries. `python docs/schedules.py FOLDER`
writes the figures for six workers.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib import colormaps, pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import jaxsparse as js
from jaxsparse.comm import SimComm, all_gather
from jaxsparse.comm.schedules import strides, team_size

Parts = dict[int, frozenset[int]]
"""Blocks, or cells of a figure, each with the workers whose gradients are summed up in it."""

_AXIS = "workers"
_SUMS = "cells: blocks, with the number of workers summed up; frames and labels: blocks sent next"
_BLOCKS = "cells: blocks that a worker holds; frames and labels: blocks sent next"
_WORKERS = "cells: workers whose entries are in the sum; frames and labels: the sum that is sent next"
_WIDTH = 7.0  # inches: 700 px at 100 dpi
_SPAN = 0.84  # width of a worker's cells, in units of the distance between workers
_HEIGHT = 0.26  # of a cell, in units of the distance between rows
_COLORS = colormaps["tab10"]  # of arrows, by sender
_SHADES = colormaps["Blues"]  # of cells, by the number of workers summed up


class Message(NamedTuple):
  """One message of a round.

  Attributes:
    source: number of the worker that sends.
    destination: number of the worker that receives.
    parts: what it carries.
  """

  source: int
  destination: int
  parts: Parts


Round = list[Message]


@dataclasses.dataclass(frozen=True)
class _Recorder(SimComm):
  """A simulated comm that notes the (source, destination) pairs and the buffer of each round."""

  log: list[tuple[list[tuple[int, int]], jax.Array]] = dataclasses.field(
    default_factory=list, compare=False
  )

  def _ppermute(self, buffer: jax.Array, pairs: list[tuple[int, int]]) -> jax.Array:
    self.log.append((pairs, buffer))
    return super()._ppermute(buffer, pairs)


def record(
  program: Callable[[js.Comm, jax.Array], object], workers: int, blocks: int
) -> list[Round]:
  """The messages of `program(comm, f32[blocks])`, which every worker runs.

  Args:
    program: what one worker does with its gradient; messages contain float32 values,
      unchanged or summed up.
    workers: number of workers P, at most 8, so that all sums are exact.
    blocks: number of blocks, each of one entry.

  Raises:
    ValueError: for more than 8 workers.
  """
  if not 1 <= workers <= 8:
    raise ValueError(f"schedules: {workers} workers, choose 1 … 8")
  named = 2.0 ** np.arange(workers)[:, None] + np.arange(blocks)[None] * 2.0**workers
  routes: list[list[tuple[int, int]]] = []

  def run(gradient: jax.Array) -> list[jax.Array]:
    comm = _Recorder(_AXIS)
    program(comm, gradient)
    routes.extend(pairs for pairs, _ in comm.log)
    return [jax.lax.bitcast_convert_type(buffer, jnp.float32) for _, buffer in comm.log]

  sent = jax.jit(jax.vmap(run, axis_name=_AXIS))(jnp.asarray(named, jnp.float32))
  read = lambda words: _parts(np.asarray(words), workers)
  return [
    [Message(source, destination, read(words[source])) for source, destination in pairs]
    for pairs, words in zip(routes, sent, strict=True)
  ]


def rounds_of(name: str, workers: int, blocks: int, **options: object) -> list[Round]:
  """The messages of one update of a collective that sends all entries."""
  collective = js.make_collective(name, density=1.0, **options)
  reduce = lambda comm, gradient: collective.reduce(
    comm, gradient, collective.init(blocks, workers)
  )
  return record(reduce, workers, blocks)


def held(
  rounds: Sequence[Round], start: Sequence[Parts], given: int
) -> list[list[Parts]]:
  """What each worker holds before the first round and after each.

  Args:
    rounds: the messages.
    start: what each worker holds at first.
    given: the number of rounds, from the first on, after which senders no longer hold
      what they sent.
  """
  states = [list(start)]
  for number, messages in enumerate(rounds):
    after = [dict(parts) for parts in states[-1]]
    for message in messages:
      for block in message.parts if number < given else ():
        del after[message.source][block]
    for message in messages:
      own = after[message.destination]
      own.update(
        {
          block: own.get(block, frozenset()) | summed
          for block, summed in message.parts.items()
        }
      )
    states.append(after)
  return states


def spar_reduce_scatter(workers: int) -> Figure:
  """SparDL's reduce-scatter: which worker sends which blocks to whom, until each has the sum of one block."""
  given = len(strides(workers))
  rounds = rounds_of("spardl", workers, workers)[:given]
  title = f"Spar-Reduce-Scatter: after {given} rounds each of {workers} workers has the sum of one block"
  return _draw(
    title, _SUMS, rounds, held(rounds, _everything(workers, workers), given), workers
  )


def bruck(workers: int) -> Figure:
  """Bruck's all-gather, which most collectives end with: every worker's own block to all workers."""
  rounds = record(
    lambda comm, gradient: all_gather(comm, gradient[comm.rank]), workers, workers
  )
  title = f"Bruck's all-gather: after {len(rounds)} rounds each of {workers} workers has all blocks"
  return _draw(title, _BLOCKS, rounds, held(rounds, _own(workers), 0), workers)


def teams(workers: int, teams: int) -> Figure:
  """An update of SparDL with teams: a reduce-scatter in each team, sums over teams, an all-gather in each team."""
  size = team_size(workers, teams)
  rounds, given = rounds_of("spardl", workers, size, teams=teams), len(strides(size))
  between = len(rounds) - 2 * given
  title = f"SparDL, {teams} teams of {size}: {given} rounds inside teams, {between} between them, {given} inside teams"
  return _draw(
    title, _SUMS, rounds, held(rounds, _everything(workers, size), given), size
  )


def tree(workers: int) -> Figure:
  """The binary tree of gTopk, to worker 0 and back: a cell for each worker whose entries are in the sum."""
  whole = rounds_of("gtopk", workers, 1)  # one block; what it sums up becomes the cells
  cells = lambda parts: {worker: frozenset([worker]) for worker in parts[0]}
  rounds = [
    [message._replace(parts=cells(message.parts)) for message in messages]
    for messages in whole
  ]
  half = len(rounds) // 2
  title = f"gTopk: {half} rounds sum up the top-k of {workers} workers at worker 0, {half} return the sum"
  return _draw(title, _WORKERS, rounds, held(rounds, _own(workers), 0), workers)


def _parts(values: np.ndarray, workers: int) -> Parts:
  """What the words of a message carry, read as floats: those of indices, small integers, are below 1."""
  parts: Parts = {}
  for value in values[values >= 1].astype(int).tolist():
    summed = frozenset(worker for worker in range(workers) if value >> worker & 1)
    block = (value >> workers) // len(summed)
    parts[block] = parts.get(block, frozenset()) | summed
  return parts


def _everything(workers: int, blocks: int) -> list[Parts]:
  """The gradient of each worker: all blocks, of itself alone."""
  return [
    {block: frozenset([worker]) for block in range(blocks)} for worker in range(workers)
  ]


def _own(workers: int) -> list[Parts]:
  """One cell of each worker, of its own number."""
  return [{worker: frozenset([worker])} for worker in range(workers)]


def _draw(
  title: str,
  caption: str,
  rounds: Sequence[Round],
  states: Sequence[Sequence[Parts]],
  cells: int,
) -> Figure:
  """A row for each state, worker w at x = w and state t at y = −t, with the messages of a round between two rows."""
  workers = len(states[0])
  figure = pyplot.figure(
    figsize=(_WIDTH, 1.4 + 0.95 * len(rounds)),
    dpi=100,
    facecolor="white",
    layout="constrained",
  )
  pyplot.close(figure)  # else a notebook shows it twice
  axes = figure.add_subplot(xlim=(-0.6, workers - 0.4), ylim=(-len(rounds) - 0.3, 0.3))
  axes.set_title(title, fontsize=10)
  axes.set_xlabel(caption, fontsize=9)
  axes.set_xticks(
    range(workers), [f"worker {worker}" for worker in range(workers)], fontsize=9
  )
  axes.set_yticks(
    range(0, -len(states), -1),
    ["start", *(f"round {t + 1}" for t in range(len(rounds)))],
    fontsize=9,
  )
  axes.tick_params(length=0, labeltop=True, labelbottom=False)
  axes.spines[:].set_visible(False)
  for y, state in zip(range(0, -len(states), -1), states, strict=True):
    for worker, parts in enumerate(state):
      _draw_cells(
        axes,
        worker,
        y,
        [parts.get(cell, frozenset()) for cell in range(cells)],
        caption == _SUMS,
      )
  for y, messages in zip(range(0, -len(rounds), -1), rounds, strict=True):
    for message in messages:
      _draw_message(axes, message, y, cells)
  return figure


def _draw_cells(
  axes: Axes, worker: int, y: int, cells: Sequence[frozenset[int]], sums: bool
) -> None:
  """What a worker holds: a filled cell with the size of its sum, or with its own number."""
  for cell, summed in enumerate(cells):
    shade = 0.25 if not sums else 0.12 * len(summed)
    left, bottom, width = _cell(worker, y, cell, len(cells))
    box = Rectangle(
      (left, bottom), width, _HEIGHT, facecolor=_SHADES(shade) if summed else "white"
    )
    box.set(edgecolor="0.6", linewidth=0.6)
    axes.add_patch(box)
    if summed:
      text, color = len(summed) if sums else cell, "white" if shade > 0.55 else "black"
      axes.text(
        left + width / 2,
        y - 0.01,
        str(text),
        color=color,
        ha="center",
        va="center",
        fontsize=8,
      )


def _draw_message(axes: Axes, message: Message, y: int, cells: int) -> None:
  """An arrow from a worker in one row to a worker in the next; frames around the cells that it carries, and a label."""
  color = _COLORS(message.source)
  for cell in message.parts:
    left, bottom, width = _cell(message.source, y, cell, cells)
    frame = Rectangle(
      (left + 0.012, bottom + 0.02), width - 0.024, _HEIGHT - 0.04, fill=False
    )
    frame.set(edgecolor=color, linewidth=1.5)
    axes.add_patch(frame)
  label = " ".join(map(str, sorted(message.parts)))
  axes.text(
    message.source,
    y - _HEIGHT / 2 - 0.08,
    label,
    color=color,
    ha="center",
    va="center",
    fontsize=8,
  )
  style = {
    "arrowstyle": "-|>",
    "color": color,
    "linewidth": 1.3,
    "shrinkA": 0,
    "shrinkB": 0,
  }
  start, end = y - _HEIGHT / 2 - 0.14, y - 1 + _HEIGHT / 2 + 0.02
  axes.annotate(
    "", (message.destination, end), (message.source, start), arrowprops=style
  )


def _cell(worker: int, y: int, cell: int, cells: int) -> tuple[float, float, float]:
  """The left and bottom edge and the width of a cell."""
  width = _SPAN / cells
  return worker - _SPAN / 2 + cell * width, y - _HEIGHT / 2, width


if __name__ == "__main__":
  folder = pathlib.Path(*sys.argv[1:])
  figures = {
    "spar_reduce_scatter": spar_reduce_scatter(6),
    "bruck": bruck(6),
    "teams": teams(6, 2),
    "tree": tree(6),
  }
  for name, figure in figures.items():
    figure.savefig(folder / f"{name}.png")

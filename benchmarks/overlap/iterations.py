"""Seconds an iteration of the ASC-WFBP paper's networks with a plan: predicted, and as the paper measured them."""

from typing import NamedTuple

import numpy as np

import jaxsparse as js
from benchmarks import papers
from benchmarks.overlap import architectures

WORKERS = 32
LINK = 9.43e9 / 8  # bytes a second, as the paper measured it with iperf3
# in the text beside Figure 6: cell, plan, plan that it is compared with, networks
_REDUCTIONS = (
  (
    "MG-WFBP / WFBP, CNNs",
    "mg_wfbp",
    "wfbp",
    [model for model in architectures.MODELS if model != "bert_base"],
  ),
  ("ASC-WFBP / MG-WFBP", "asc_wfbp", "mg_wfbp", list(architectures.MODELS)),
)


class Paper(NamedTuple):
  """The paper's seconds of computing in an iteration, on each of 32 GPUs."""

  forward: float
  backward: float


def _read_paper(model: str) -> Paper:
  """Its figures for a network: S · t(ASC) / P of Tables IV and V, a third of it forward; the text has ResNet-152's."""
  speed_up = papers.number("ASC-WFBP", "Table V, S", f"{model} speed_up")
  seconds = papers.number("ASC-WFBP", "Table IV", f"{model} asc_wfbp")
  third = speed_up * seconds / WORKERS / 3 if model != "resnet152" else 0.091
  return Paper(third, 2 * third)


PAPER = {model: _read_paper(model) for model in architectures.MODELS}


class Row(NamedTuple):
  """One plan for one network."""

  model: str  # the network
  plan: str  # the kind of plan
  groups: int  # number of communications
  most_at_once: int  # of them
  seconds: float  # predicted, of an iteration with its forward pass
  exposed: float  # predicted, those of communication that backward does not hide
  speed_up: float  # predicted S
  bound: float  # S_max by Eq. 42


def layers_of(model: str) -> tuple[list[float], list[float]]:
  """Seconds of backward, scaled to the paper's total, and bytes of the float32 gradient of every tensor."""
  tensors = architectures.MODELS[model]()
  scale = PAPER[model].backward / sum(tensor.seconds for tensor in tensors)
  return [scale * tensor.seconds for tensor in tensors], [
    4.0 * tensor.entries for tensor in tensors
  ]


def bound_of(model: str) -> float:
  """S_max, Eq. 42: the link always full, backward or sending hidden by the other."""
  backward, sending = PAPER[model].backward, 2 * sum(layers_of(model)[1]) / LINK
  computing = PAPER[model].forward + backward
  return WORKERS * computing / (computing + sending - min(backward, sending))


def row(model: str, plan: js.overlap.Plan) -> Row:
  """The prediction."""
  paper = PAPER[model]
  seconds, spans = paper.forward + plan.iteration_time, plan.timeline
  at_once = max(
    1 + sum(other.end > one.start for other in spans[:number])
    for number, one in enumerate(spans)
  )
  speed_up = WORKERS * (paper.forward + paper.backward) / seconds
  return Row(
    model,
    plan.kind,
    len(plan.groups),
    at_once,
    seconds,
    plan.exposed,
    speed_up,
    bound_of(model),
  )


def measured(rows: list[Row]) -> dict[str, float]:
  """The cells of the paper's tables that were predicted, by their names."""
  found: dict[str, float] = {}
  for row in rows:
    name = f"{row.model} {row.plan}"
    found |= {
      name: row.seconds,
      f"{name} exposed": row.exposed,
      f"{row.model} bound": row.bound,
    }
    found |= {f"{row.model} speed_up": row.speed_up} if row.plan == "asc_wfbp" else {}
  for model in PAPER:
    for name, plan in ("s1", "wfbp"), ("s2", "mg_wfbp"):
      own = [found.get(f"{model} {one}") for one in (plan, "asc_wfbp")]
      found |= {f"{model} {name}": own[0] / own[1]} if own[0] and own[1] else {}
  exposed = {(row.model, row.plan): row.exposed for row in rows}
  for name, plan, before, models in _REDUCTIONS:
    ratios = [
      exposed.get((model, plan), 0) / (exposed.get((model, before)) or np.inf)
      for model in models
    ]
    found |= (
      {f"{name}, the most": max(ratios), f"{name}, the least": min(ratios)}
      if all(ratios)
      else {}
    )
  return found

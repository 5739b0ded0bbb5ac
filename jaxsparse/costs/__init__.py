"""The cost of an update: messages and words, counted and predicted, and seconds by a measured α-β model.

count, predict          messages and words of one update between workers (counting)
count_update            the same of any optax chain: of local steps, of a plan, of several transforms
fit -> Profile          α, β, γ and the seconds of each Algorithm's arithmetic, measured (calibration)
advise                  seconds per step of every algorithm, and the fastest, dense included (advice)
audit                   what crosses an axis of the mesh in a compiled program, with the lines of its source (audit)
link_of                 α, β and γ of one update of an algorithm, for `js.overlap.plan` (advice)
evidence                the steps of methods to dense's loss in trainings, for `advise` (advice)
contraction             how much of gradients a collective leaves out, step by step (train.simulation)
label_of                a collective and its options as text, for `fit`
"""

from jaxsparse.collectives._base import label_of
from jaxsparse.costs.advice import advise, evidence, link_of
from jaxsparse.costs.audit import audit
from jaxsparse.costs.calibration import Algorithm, Profile, fit
from jaxsparse.costs.counting import count, count_update, predict
from jaxsparse.train.simulation import contraction

__all__ = [
  "Algorithm",
  "Profile",
  "advise",
  "audit",
  "contraction",
  "count",
  "count_update",
  "evidence",
  "fit",
  "label_of",
  "link_of",
  "predict",
]

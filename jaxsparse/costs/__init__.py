"""The cost of an update: messages and words, counted and predicted, and seconds by a measured α-β model.

count, predict          messages and words of one update between workers (counting)
count_update            the same of any optax chain: of local steps, of a plan, of several transforms
inside                  messages and words between the devices of a worker
fit -> Profile          α, β, γ and the seconds of each algorithm's arithmetic, measured (calibration)
advise -> Advice        seconds per step of every algorithm, and the fastest, dense included (advice)
evidence -> [Evidence]  the steps of methods to dense's loss in trainings, for `advise` (evidence)
"""

from jaxsparse.collectives._base import collective_of, label_of
from jaxsparse.comm import all_reduce_cost
from jaxsparse.costs.advice import Advice, Prediction, advise
from jaxsparse.costs.calibration import Algorithm, Profile, fit
from jaxsparse.costs.counting import count, count_jaxpr, count_update, inside, predict, schedule
from jaxsparse.costs.evidence import Evidence, evidence

__all__ = [
  "Advice",
  "Algorithm",
  "Evidence",
  "Prediction",
  "Profile",
  "advise",
  "all_reduce_cost",
  "collective_of",
  "count",
  "count_jaxpr",
  "count_update",
  "evidence",
  "fit",
  "inside",
  "label_of",
  "predict",
  "schedule",
]

"""TopkDSA in numpy: owners of equal regions add up what they are sent, in the order of the senders."""

from tests.reference import added, dense, largest


def topkdsa(gradients, residuals, k, slots):
  """Total f32[n] and residuals f32[P, n]; a message has room for `slots` entries, and the largest of them go."""
  ranks, n = gradients.shape
  home = gradients + residuals
  length = -(-n // ranks)
  sent = [[{} for _ in range(ranks)] for _ in range(ranks)]
  for rank in range(ranks):
    for i, value in largest(dict(enumerate(home[rank])), k).items():
      message = sent[rank][i // length]
      if len(message) < slots:
        message[i] = value
  total = dense(added(*[added(*[sent[rank][region] for rank in range(ranks)]) for region in range(ranks)]), n)
  kept = home.copy()
  for rank in range(ranks):
    for message in sent[rank]:
      for i in message:
        if total[i] != 0:
          kept[rank, i] = 0
  return total, kept

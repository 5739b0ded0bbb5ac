"""The fluid model of simultaneous communications in plain Python, event after event, and every plan there is."""

import itertools
import math


def ends(ready, sizes, after, alpha, beta, gamma):
  """When each communication ends; number g starts when it is ready, g − 1 has started and those of after[g] ended."""
  clock, started, begins, left, end = 0.0, 0, [], [], []
  while len(end) < len(ready) or None in end:
    while (
      started < len(ready)
      and ready[started] <= clock
      and all(end[g] is not None for g in after[started])
    ):
      begins.append(clock + alpha)
      left.append(beta * sizes[started])
      end.append(None)
      started += 1
    sending = [g for g in range(started) if end[g] is None and begins[g] <= clock]
    done = [g for g in sending if left[g] <= 0]
    if done:
      for g in done:
        end[g] = clock
      continue
    slow = 1 + (gamma - 1) * (len(sending) - 1)
    events = [(clock + left[g] * slow, g) for g in sending]
    events += [
      (begins[g], None) for g in range(started) if end[g] is None and begins[g] > clock
    ]
    events += (
      [(ready[started], None)]
      if started < len(ready) and ready[started] > clock
      else []
    )
    clock_then, first = min(events, key=lambda event: event[0])
    for g in sending:
      left[g] = 0.0 if g == first else max(0.0, left[g] - (clock_then - clock) / slow)
    clock = clock_then
  return end


def every_plan(count, ways):
  """(firsts, after) of every plan: a first layer and the groups to wait for, group by group.

  A group waits for what the one before waited for, and for all others but some, fewer
  than `ways`.
  """
  for bits in itertools.product((False, True), repeat=count - 1):
    firsts = [
      layer for layer in reversed(range(count)) if layer == 0 or bits[layer - 1]
    ]
    running = [[()]]
    for number in range(1, len(firsts)):
      grown = []
      for before in running:
        candidates = [*before[-1], number - 1]
        for size in range(min(ways, len(candidates) + 1)):
          grown += [
            [*before, some] for some in itertools.combinations(candidates, size)
          ]
      running = grown
    for plan in running:
      yield (
        firsts,
        [sorted({*range(number)} - {*some}) for number, some in enumerate(plan)],
      )


def seconds(times, sizes, firsts, after, alpha, beta, gamma):
  """Of one iteration with groups that begin at these layers."""
  ready = [sum(times[first:]) for first in firsts]
  bounds = [len(times), *firsts]
  grouped = [sum(sizes[low:high]) for high, low in itertools.pairwise(bounds)]
  return max(ends(ready, grouped, after, alpha, beta, gamma))


def fastest(times, sizes, ways, alpha, beta, gamma):
  """Seconds of the fastest plan, by trying all."""
  plans = every_plan(len(times), ways)
  return min(
    (seconds(times, sizes, *one, alpha, beta, gamma) for one in plans), default=math.inf
  )

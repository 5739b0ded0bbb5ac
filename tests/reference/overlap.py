"""The fluid model of simultaneous communications in plain Python, event after event, and every plan there is."""

import itertools
import math


def ends(ready, sizes, after, alpha, beta, gamma):
  """When each communication ends; number g starts when it is ready, g − 1 has started and the first after[g] ended."""
  clock, started, begins, left, end = 0.0, 0, [], [], []
  while len(end) < len(ready) or None in end:
    while started < len(ready) and ready[started] <= clock and None not in end[: after[started]]:
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
    events += [(begins[g], None) for g in range(started) if end[g] is None and begins[g] > clock]
    events += [(ready[started], None)] if started < len(ready) and ready[started] > clock else []
    clock_then, first = min(events, key=lambda event: event[0])
    for g in sending:
      left[g] = 0.0 if g == first else max(0.0, left[g] - (clock_then - clock) / slow)
    clock = clock_then
  return end


def every_plan(count, ways):
  """(firsts, after) of every plan: a first layer and a number of groups to wait for, group by group."""
  for bits in itertools.product((False, True), repeat=count - 1):
    firsts = [layer for layer in reversed(range(count)) if layer == 0 or bits[layer - 1]]
    choices = (False, True) if ways > 1 else (False,)
    for waits in itertools.product(choices, repeat=len(firsts) - 1):
      after = [0]
      for number, at_once in enumerate(waits, start=1):
        after.append(max(after[-1], number - ways + 1, 0) if at_once else number)
      yield firsts, after


def seconds(times, sizes, firsts, after, alpha, beta, gamma):
  """Of one iteration with groups that begin at these layers."""
  ready = [sum(times[first:]) for first in firsts]
  bounds = [len(times), *firsts]
  grouped = [sum(sizes[low:high]) for high, low in itertools.pairwise(bounds)]
  return max(ends(ready, grouped, after, alpha, beta, gamma))


def fastest(times, sizes, ways, alpha, beta, gamma):
  """Seconds of the fastest plan, by trying all."""
  plans = every_plan(len(times), ways)
  return min((seconds(times, sizes, *one, alpha, beta, gamma) for one in plans), default=math.inf)

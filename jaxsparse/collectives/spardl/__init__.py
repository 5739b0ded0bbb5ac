"""SparDL: Spar-Reduce-Scatter, Spar-All-Gather, global residuals (Zhao et al., "SparDL", §3, Algorithms 1 and 2).

Blocks of the gradient are reduced while they travel, and each is cut to its L = ⌈k d/P⌉ largest entries just before it
leaves, so that messages never grow. One team (d = 1) of six workers, the blocks that worker 0 sends, L entries each:

    reduce-scatter   stride 4   blocks 4 5      ->  worker 4   which adds them to its own
                     stride 2   blocks 2 3      ->  worker 2
                     stride 1   block  1        ->  worker 1
                     worker 0 now holds the sum of block 0
    all-gather       stride 1   block  0        ->  worker 5
                     stride 2   blocks 0 1      ->  worker 4
                     stride 4   blocks 0 1      ->  worker 2   (2 of 6 were missing)

2⌈log₂P⌉ messages and 4 L (P − 1) words for any P: no round knows whether P is a power of two.

With d teams the two halves run inside teams of P/d workers, over P/d blocks, and in between Spar-All-Gather adds up the
same block of all teams (§3.3): fewer rounds for more words. Two teams of three, worker 0:

    reduce-scatter   stride 2   block  2        ->  worker 2   of its team 0 1 2
                     stride 1   block  1        ->  worker 1
    R-SAG            block 0  <->  worker 3   which is worker 0 of the other team; both keep L of the sum
    all-gather       stride 1   block  0        ->  worker 2
                     stride 2   block  0        ->  worker 1

R-SAG repeats that log₂d times, for a power of two. B-SAG, for any d, gathers the h largest entries of each team instead
and adds them up at once; h follows the number N of different indices that come together (Algorithm 2), so that about L
remain. (The lower end 2k(d² + P − 2d)/(Pd) of B-SAG's words in the paper's Table 1 leaves out the reduce-scatter.)
"""

from typing import Literal

import optax

from jaxsparse._compat import AxisName
from jaxsparse.collectives.spardl.algorithm import SparDL
from jaxsparse.sparse.codec import Wire
from jaxsparse.transform.update import transform_of
from jaxsparse.types import Comm


def spardl_transform(
  axis: AxisName | Comm,
  *,
  density: float | None = None,
  k: int | None = None,
  teams: int = 1,
  sag: Literal["auto", "recursive", "bruck"] = "auto",
  residual: Literal["global", "partial", "local"] = "global",
  selector: Literal["exact", "chunked", "reuse"] = "exact",
  wire: Wire = "f32",
) -> optax.GradientTransformation:
  """Averages gradients over the workers, k of n entries a step, and keeps the rest for later steps (SparDL, §3).

  With `home = gradient + residual` at each of P workers, the update is `total / P`, where `total` estimates the sum of
  all `home` at k indices I, and the new residuals hold exactly what it leaves out:

      total + Σ_w residual_w  =  Σ_w home_w      (Law C)

  It must be the **first** transformation of its chain: it takes the local, un-averaged gradients of one worker, inside
  `jax.shard_map` over `axis` with `check_vma=False` (`js.make_train_step` does it), and what follows sees the average.

  Args:
    axis: the name of the shard_map axis the workers lie along, a tuple of such names, or a comm.
    density: ρ in (0, 1]; k = ⌈ρ n⌉ entries are delivered.
    k: the number of entries to deliver instead, 1 … n. It is rounded up to ⌈k d/P⌉ for each of P/d blocks.
    teams: d, a divisor of P. More teams take fewer messages, 2⌈log₂(P/d)⌉ + ⌈log₂d⌉, which helps where the start-up of
      a message dominates. Each worker then reduces P/d longer blocks, and sums of teams sort entries: six workers with
      n = 14.7 M at 1 Gbit/s take 217 ms an update with one team, 472, 632 and 761 ms with 2, 3 and 6.
    sag: how teams add up their blocks. "recursive" (R-SAG) takes a power of two of teams, "bruck" (B-SAG) any number;
      "auto" is the first where it can be.
    residual: what to keep of the entries that are not delivered. "global" keeps all. "partial" (without what later
      workers drop at I) and "local" (only what this worker did not send) are the paper's ablation (§4.1.3) and lose
      gradient mass.
    selector: how the L entries of a block are chosen. "exact" takes the largest. "chunked" takes the largest of each of
      L equal chunks, dealt out like cards: less to do, and a place within a chunk is a byte on the wire. "reuse" takes
      those of the largest that reach a threshold known from the last step, which goes up as residuals fill, and down
      while fewer than L reach it; where far too many do, or fewer than half did in the last step, entries are chosen as
      by "exact".
    wire: how values travel. "bf16" rounds to 8 bits, "int8" to 127 levels of the largest of a message's block, up or
      down at random so that the mean stays; both also write indices in about 9 bits each. What is rounded off stays in
      the residual of the worker that did it.

  Returns:
    An `optax.GradientTransformation`. Its state holds the residual, f32[n] a worker, whatever the gradients' dtype.

  Raises:
    ValueError: for a density, k, teams or another option outside their choices, teams that do not divide P, outside
      shard_map, or with a state of other sizes.
    TypeError: for gradients that are not floating point.

  Example:
    >>> import jax, jax.numpy as jnp, optax, jaxsparse as js
    >>> tx = optax.chain(js.spardl_transform("workers", density=0.25), optax.sgd(0.1))
    >>> mesh = jax.make_mesh((len(jax.devices()),), ("workers",))
    >>> params = {"w": jnp.zeros((4, 4))}
    >>> state = js.init(tx, params, mesh, axis="workers")
    >>> step = js.make_train_step(lambda p, batch: jnp.sum((p["w"][None] - batch) ** 2), tx, mesh, axis="workers")
    >>> params, state, metrics = step(params, state, jnp.ones((len(jax.devices()), 4, 4)))
    >>> float(metrics.loss)
    16.0
  """
  collective = SparDL(density=density, k=k, teams=teams, sag=sag, residual=residual, selector=selector, wire=wire)
  return transform_of(collective, axis)

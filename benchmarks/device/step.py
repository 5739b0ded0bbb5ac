"""The step: forward and backward of a transformer, with dense Adam, and with signs of the updates of two optimizers."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.table

import jaxsparse as js
from benchmarks import methods, recipes, report
from benchmarks.compiled import hlo
from benchmarks.device import timing
from benchmarks.device.running import Row, Run, make_ahead
from benchmarks.device.setting import Setting, Step
from jaxsparse.comm import SoloComm

PART = "step"


def _transform(step: Step, workers: int) -> optax.GradientTransformation:
  """The chain of one of `workers` workers, whose messages are copies of its own."""
  (method,) = methods.parse("method", [step.method], workers)
  (optimizer,) = recipes.parse_optimizers([step.optimizer], 0.0)
  return method.make(SoloComm(workers), optimizer.make(optimizer.rate))


class Program(NamedTuple):
  """A compiled step of (tokens, (parameters, state)), of which it donates the last."""

  compiled: Any
  seconds: float  # of tracing, lowering and compiling
  start: Callable[[], Any]  # gives the first parameters and state


@functools.cache
def _compile(step: Step, setting: Setting) -> Program:
  model = setting.model
  tx = _transform(step, setting.workers) if step.method else None

  def program(tokens: jax.Array, carried: Any) -> Any:
    params, state = carried
    loss, grads = jax.value_and_grad(model.loss)(
      params if tx is None else js.own_params(params, state), tokens
    )
    if tx is None:
      return (loss, grads), carried
    updates, state = tx.update(grads, state, params)
    return loss, (optax.apply_updates(params, updates), state)

  def start() -> Any:
    params = jax.jit(model.parameters)()
    return params, jax.jit(tx.init)(params) if tx else ()

  began = time.perf_counter()
  tokens = jax.ShapeDtypeStruct((setting.sequences, model.length + 1), jnp.int32)
  compiled = (
    jax.jit(program, donate_argnums=1).lower(tokens, jax.eval_shape(start)).compile()
  )
  return Program(compiled, time.perf_counter() - began, start)


def time_step(step: Step, setting: Setting) -> Row:
  """Times a step, and says what memory it takes by the compiler and by the allocator.

  Returns:
    `peak_by_compiler` and `peak` in bytes. The allocator counts since the process
    began: `peak` is None where it does not count, or where an earlier program took
    more.
  """
  program = _compile(step, setting)
  model = setting.model
  shape = setting.sequences, model.length + 1
  tokens = np.random.default_rng(0).integers(0, model.symbols, shape, np.int32)
  before = timing.peak_so_far()
  carried = program.start()
  times, result, carried = timing.times_of(
    program.compiled, lambda _: jnp.asarray(tokens), carried, setting.repetitions
  )
  peak = timing.peak_so_far()
  loss = float(jax.tree.leaves(result)[0])
  if not all(
    bool(jnp.isfinite(x).all())
    for x in [jnp.float32(loss), *jax.tree.leaves(carried[0])]
  ):
    raise RuntimeError(
      f"after {times.calls} steps the loss is {loss}, or a parameter is not finite"
    )
  return {
    "parameters": model.entries,
    "tokens": setting.sequences * model.length,
    "compile": program.seconds,
    **times._asdict(),
    "loss": loss,
    "peak_by_compiler": hlo.memory_of(program.compiled).peak,
    "peak": peak if peak is not None and before is not None and peak > before else None,
  }


def measure(run: Run, setting: Setting, until: float) -> None:
  """The rows of this part."""
  make_ahead(
    [functools.partial(_compile, step, setting) for step in setting.steps],
    run.left(until) / 2,
  )
  for step in setting.steps:
    run.measure(PART, step.label, until, functools.partial(time_step, step, setting))


def table(rows: Sequence[Row], title: str) -> rich.table.Table:
  """Milliseconds and memory of each step."""
  ms = report.milliseconds
  megabytes = lambda size: report.number(size and size / 1e6, ",.0f")
  lines = []
  for row in rows:
    rate = f"{row['tokens'] / row['queued']:,.0f}"
    memory = (
      megabytes(row["peak"]),
      megabytes(row["peak_by_compiler"]),
      report.ratio(row["peak"], row["peak_by_compiler"]),
    )
    lines.append(
      [
        row["row"],
        *(ms(row[name], 2) for name in ("seconds", "p90", "queued")),
        rate,
        *memory,
      ]
    )
    lines[-1].append(f"{row['compile']:.1f}")
  heads = (
    "step",
    "ms",
    "p90",
    "queued",
    "tokens/s",
    "peak MB",
    "by the compiler",
    "ratio",
    "compile s",
  )
  return report.table(
    title,
    heads,
    lines,
    caption="ms: median of blocked calls; queued: of several in a queue",
  )

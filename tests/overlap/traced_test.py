"""What a trace says of a run: which operations send, when, and what goes on meanwhile."""

import gzip
import json

import jax
import jax.numpy as jnp
import pytest

import jaxsparse as js
from tests.cases import mesh_of

PROGRAM = """HloModule jit_step, is_scheduled=true
ENTRY %main {
  %dot.1 = f32[2,2]{1,0} dot(%a, %b)
  %psum.1 = f32[4]{0} all-reduce(%dot.1), channel_id=1
  ROOT %loop = (f32[4]{0}) while(%psum.1), condition=%c, body=%d
}
"""


def event(op, start, duration, run="1", device="0", module="jit_step"):
  args = {"hlo_op": op, "hlo_module": module, "run_id": run, "device_ordinal": device}
  return {"ph": "X", "name": op, "ts": start, "dur": duration, "args": args}


def write(folder, events):
  (folder / "one.trace.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))


def test_hidden_is_what_goes_on_beside_a_collective(tmp_path):
  first = [event("dot.1", 1000, 100), event("psum.1", 1200, 400), event("dot.1", 1500, 300), event("loop", 1000, 900)]
  other = [event("psum.1", 1000, 5, device="1"), event("dot.1", 0, 5, module="jit_other"), {"ph": "M", "name": "x"}]
  write(tmp_path, [event("dot.1", 5000, 100, run="2"), *first, *other])
  one, two = js.overlap.traced(tmp_path, PROGRAM)
  assert one.collectives == (("psum.1", pytest.approx(200e-6), pytest.approx(600e-6)),)
  assert (one.seconds, one.sending, one.hidden) == pytest.approx((900e-6, 400e-6, 0.25))
  assert (two.seconds, two.sending, two.hidden, two.collectives) == (pytest.approx(1e-4), 0.0, 0.0, ())


def test_an_operation_lasts_until_the_event_of_its_end(tmp_path):
  write(
    tmp_path,
    [event("dot.1", 0, 10), {"ph": "X", "name": "end: dot.1", "ts": 300.0, "dur": 1}, event("psum.1", 100, 200)],
  )
  (one,) = js.overlap.traced(tmp_path, PROGRAM)
  assert one.hidden == pytest.approx(1.0)


def test_a_real_run_has_the_collectives_of_its_plan(tmp_path):
  params = [jnp.ones((4, 8)), jnp.ones((8, 2)) / 8]
  plan = js.overlap.plan("wfbp", [0.1, 0.1], [128, 64], alpha=1e-3, beta=1e-9, gamma=1.5)
  tx, mesh = js.bucketed_transform("dense", "workers", plan=plan), mesh_of(2)
  step = js.make_train_step(lambda p, x: jnp.sum(jnp.tanh(x @ p[0]) @ p[1]), tx, mesh)
  state, batch = js.init(tx, params, mesh), jnp.ones((4, 4))
  text = step.lower(params, state, batch).compile().as_text()
  params, state, metrics = step(params, state, batch)
  jax.block_until_ready((params, metrics))
  with jax.profiler.trace(str(tmp_path)):
    jax.block_until_ready(step(params, state, batch))
  (one,) = js.overlap.traced(tmp_path, text)
  assert len(one.collectives) == len(plan.groups) + 1  # and the mean of the loss
  assert 0 < one.sending <= one.seconds


@pytest.mark.parametrize(("program", "message"), [(PROGRAM, "no run of 'jit_step'"), ("", "no run of 'a text that")])
def test_a_trace_of_something_else(tmp_path, program, message):
  with pytest.raises(ValueError, match="has no trace, give the folder of jax.profiler.trace"):
    js.overlap.traced(tmp_path, program)
  write(tmp_path, [event("dot.1", 0, 5, module="jit_other")])
  with pytest.raises(ValueError, match=message):
    js.overlap.traced(tmp_path, program)

"""Tunix: the `PeftTrainer` of docs/how_to/trainers.md, and what the page's diff makes of it."""

import pytest

from tests.docs_test import blocks, run, snippets
from tests.trainers.diffs import changed, lines_changed

pytest.importorskip("tunix")
THEIRS = snippets("docs/how_to/trainers.md")[2]
(DIFF,) = [
  diff for diff in blocks("docs/how_to/trainers.md", "diff") if "PeftTrainer" in diff
]
SPARDL = 'js.spardl_transform("workers", density=0.1)'
DENSE = DIFF.replace(SPARDL, 'js.dense_transform("workers")')
ONE, TWO = (
  '(4,), ("workers",), (',
  '(2, 2), ("workers", "fsdp"), (jax.sharding.AxisType.Auto, ',
)
MODEL = "model = Model(nnx.Rngs(0))\n"
PLACE = "nnx.update(model, jax.device_put(nnx.state(model), jax.NamedSharding(mesh, jax.P({}))))\n"
SHOW = """
kept = jax.tree.leaves(nnx.to_pure_dict(nnx.state(model)))
losses = [trainer.metrics_logger.get_metric_history("", "loss", when)[-1] for when in ("train", "eval")]
print(*jnp.concatenate([leaf.reshape(-1) for leaf in kept]), *losses)
"""
WORDS = "print('words', int(js.metrics(nnx.as_pure(trainer.optimizer.opt_state)).words_sent))\n"


def numbers(code, folder):
  """Parameters, loss of the last step and held-out loss."""
  return [float(found) for found in run(code + SHOW, folder).splitlines()[-1].split()]


@pytest.mark.parametrize("kind", ["plain", "LoRA", "sharded"])
def test_dense_is_theirs(kind, tmp_path):
  """Also where only the factors of a LoRA are trained, and where a worker's parameters are on two devices."""
  assert lines_changed(DIFF) == (10, 1)
  edits = {
    "LoRA": [("nnx.Linear(16, 32,", "nnx.LoRALinear(16, 32, lora_rank=2,")],
    "sharded": [
      (ONE, TWO),
      ('data_sharding_axis=("workers",)', 'data_sharding_axis=(("workers", "fsdp"),)'),
      (MODEL, MODEL + PLACE.format("'fsdp'")),
    ],
  }
  theirs, own = THEIRS, changed(THEIRS, DENSE)
  for before, after in edits.get(kind, []):
    theirs, own = theirs.replace(before, after), own.replace(before, after)
  assert numbers(own, tmp_path) == pytest.approx(
    numbers(theirs, tmp_path), rel=1e-5, abs=1e-6
  )


def test_spardl_learns_with_fewer_words_and_goes_on_from_a_checkpoint(tmp_path):
  own, folder = (
    changed(THEIRS, DIFF).replace(MODEL, MODEL + PLACE.format("")),
    str(tmp_path / "saved"),
  )
  whole = numbers(own, tmp_path)
  assert whole[-1] < 2  # 3.5 at the start
  saved = own.replace(
    "data_sharding_axis", f"checkpoint_root_directory={folder!r}, data_sharding_axis"
  )
  half = saved.replace("trainer.train(batches,", "trainer.train(batches[:20],")
  assert int(run(half + WORDS, tmp_path).split()[-1]) == 324
  assert numbers(saved, tmp_path) == whole


def test_gradient_accumulation_is_not_possible(tmp_path):
  code = changed(THEIRS, DIFF).replace(
    "data_sharding_axis", "gradient_accumulation_steps=2, data_sharding_axis"
  )
  with pytest.raises(
    AssertionError, match="'MultiSteps' object has no attribute 'value_and_grad'"
  ):
    run(code, tmp_path)

"""The race's tasks: the papers' parameter counts, batches decided by seed, step and worker, and what is held out."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxsparse as js
from benchmarks import methods, recipes, workers
from benchmarks.overlap import architectures
from benchmarks.tasks import base, images, lm, lstm, registry, text, vgg16
from benchmarks.tasks.base import IGNORED, Task, drawn, entries_of, model_of
from benchmarks.trainer import Trainer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of flax
ENTRIES = {
  "lm": 3_295_232,
  "lm_medium": 664_320,
  "bert": 664_320,
  "lstm": 1_184_000,
  "resnet20": 269_722,  # SparDL, Table 2; A2SGD, Table I
  "vgg16": 14_728_266,  # the same, and Ok-Topk, Table 2
  "fnn3": 199_210,  # A2SGD, Table I
}


def batch_of(task, seed, step, workers, size):
  return next(itertools.islice(task.stream(seed, workers, size), step, None))


@pytest.fixture(scope="module")
def tasks():
  return {name: registry.make(name) for name in ENTRIES}


def test_parameter_counts_are_the_papers(tasks):
  assert {name: task.entries for name, task in tasks.items()} == ENTRIES
  assert entries_of(lambda: lstm.LSTM(10_000, 1500, nnx.Rngs(0))) == 66_034_000  # A2SGD, Table I
  assert entries_of(lambda: vgg16.VGG(vgg16.VGG19, 100, nnx.Rngs(0))) == 20_086_692  # SparDL, Table 2
  bert = sum(tensor.entries for tensor in architectures.bert_base())
  assert bert + 768 * 30_522 == 133_547_324  # Ok-Topk, Table 2: the decoder's weight is not tied


def test_a_share_of_a_batch_depends_on_seed_step_and_worker_alone(tasks):
  for name, task in tasks.items():
    whole = batch_of(task, seed=1, step=7, workers=3, size=2)
    again = batch_of(task, seed=1, step=7, workers=2, size=2)
    for field in ("input", "label"):
      np.testing.assert_array_equal(whole[field][:4], again[field], err_msg=name)
    others = [batch_of(task, seed, step, 2, 2)["input"] for seed, step in ((2, 7), (1, 8))]
    others.append(whole["input"][2:])
    assert not any(np.array_equal(other[:2], whole["input"][:2]) for other in others), name


def test_text_that_is_held_out_is_not_trained_on():
  source = text.library()
  train, held_out = (set(part.tobytes().split(b"\n\n")) for part in (source.train, source.held_out))
  assert not train & held_out
  assert 0.05 < len(source.held_out) / len(source.train) < 0.2
  assert len(source.train) > 1_000_000
  assert not np.any(source.train == 0)  # the byte that hides others


def test_masked_bytes_are_those_to_predict(tasks):
  batch = next(tasks["bert"].stream(0, 1, 64))
  hidden = batch["label"] != IGNORED
  np.testing.assert_array_equal(batch["input"] == 0, hidden)
  assert 0.12 < hidden.mean() < 0.18


def test_labels_that_are_ignored_do_not_count():
  logits = jnp.eye(4)[None] * 3
  labels = np.array([[0, 1, IGNORED, 0]])
  losses, right, count = base._scores(logits, labels)
  alone = [float(base._scores(logits[:, one : one + 1], labels[:, one : one + 1])[0]) for one in (0, 1, 3)]
  np.testing.assert_allclose(losses, sum(alone), rtol=1e-6)
  assert (int(right), int(count)) == (2, 3)


def test_an_untrained_language_model_knows_nothing(tasks):
  model = model_of(tasks["lm_medium"], seed=0)
  loss, accuracy = model.evaluate(model.params, model.statistics)
  assert abs(loss - np.log(256)) < 0.1
  assert accuracy < 0.1


def test_an_lstm_sees_no_later_byte():
  module = lstm.LSTM(lm.BYTES, 8, nnx.Rngs(0))
  before = np.zeros((1, 6), np.uint8)
  after = before.copy()
  after[0, 4] = 7
  changed = np.abs(np.asarray(module(before) - module(after))).max(-1)[0]
  assert not changed[:4].any()
  assert changed[4:].all()


def test_images_are_enlarged_and_cut_around_their_centre():
  small = np.arange(4.0, dtype=np.float32).reshape(1, 2, 2, 1)
  large = images._shaped(small, (3, 3, 3))
  assert large.shape == (1, 3, 3, 3)
  np.testing.assert_array_equal(large[0, :, :, 1], [[0, 0, 1], [0, 0, 1], [2, 2, 3]])
  assert images._shaped(np.ones((1, 4, 4, 3), np.float32), (4, 4, 1)).shape == (1, 4, 4, 1)


class Normalized(nnx.Module):
  """Batch normalization alone."""

  def __init__(self):
    self.norm = nnx.BatchNorm(2, momentum=0.5, rngs=nnx.Rngs(0))

  def __call__(self, x):
    return self.norm(x)


def test_training_moves_running_statistics_and_evaluation_uses_them():
  inputs, labels = np.array([[10.0, 0.0], [12.0, 0.0]], np.float32), np.array([0, 1], np.int32)
  task = Task("norm", "two rows", lambda _: Normalized(), drawn(lambda *_: (inputs, labels)), (inputs, labels))
  model = model_of(task, seed=0)
  _, after = jax.jit(model.loss)(model.params, next(task.stream(0, 1, 2)), model.statistics)
  means = [leaf for leaf in jax.tree.leaves(after) if float(leaf[0]) == 5.5]  # half of the way from 0 to 11
  assert len(means) == 1
  assert model.evaluate(model.params, after) != model.evaluate(model.params, model.statistics)


@pytest.mark.long
@pytest.mark.parametrize("name", ENTRIES)
def test_each_task_trains(tasks, name):
  (method,) = methods.parse("method", ["updates/spardl:density=0.1"], 2)
  recipe = recipes.Recipe(recipes.Optimizer("adam", 0.001), clip=1.0)
  comm = js.SimComm("workers", members=2)
  place = workers.Workers(comm, comm, 2, shares=2, number=0)
  task = tasks[name]._replace(held_out=tuple(part[:2] for part in tasks[name].held_out))
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    trainer = Trainer(task, method, recipe, place, batch_size=2, seed=0)
    losses = [trainer.step() for _ in range(3)]
    loss, accuracy = trainer.evaluate()
  assert np.isfinite([*losses, loss]).all()
  assert 0 <= accuracy <= 1
  assert losses[0] < 8  # about that of guessing, log 10 or log 256


def test_unknown_tasks_and_folders_are_refused(tmp_path):
  with pytest.raises(ValueError, match="--task=mnist, choose one of lm, lm_medium"):
    registry.make("mnist")
  with pytest.raises(ValueError, match="is for tasks on images, resnet20, vgg16, fnn3; --task=lm has a text"):
    registry.make("lm", str(tmp_path))
  with pytest.raises(FileNotFoundError, match="data_batch_1"):
    registry.make("resnet20", str(tmp_path))

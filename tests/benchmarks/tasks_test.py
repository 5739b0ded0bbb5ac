"""Tasks: the papers' parameter counts, batches by seed, step and worker, what is held out, and CIFAR-10's files."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks import methods, recipes, workers
from benchmarks.one_training import Trainer
from benchmarks.overlap import architectures
from benchmarks.sweep import training as sweep
from benchmarks.tasks import (
  base,
  cartpole,
  data,
  images,
  lm,
  physics,
  registry,
  text,
)
from benchmarks.tasks.base import IGNORED, Task, drawn, entries_of, model_of
from tests.cases import quick_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of flax
ENTRIES = {
  "lm": 3_295_232,
  "lm_small": 135_424,
  "lm_medium": 664_320,
  "lm_wide": 12_881_920,
  "bert": 664_320,
  "lstm": 1_184_000,
  "resnet20": 269_722,  # SparDL, Table 2; A2SGD, Table I
  "vgg16": 14_728_266,  # the same, and Ok-Topk, Table 2
  "fnn3": 199_210,  # A2SGD, Table I
}
MADE = {
  "recommender": 75_002,
  "flow": 84_934,
  "letters": 49_306,
  "physics": 8_577,
  "adapters": 7_032,
  "cartpole": 4_675,
}


@pytest.fixture(scope="module")
def tasks():
  return {name: registry.make(name) for name in ENTRIES}


@pytest.mark.long
# Adam, which trains the layers of adapters, needs it.
@jax.numpy_dtype_promotion("standard")
def test_parameter_counts_are_the_papers(tasks):
  assert {name: task.entries for name, task in tasks.items()} == ENTRIES
  assert {name: registry.make(name).entries for name in MADE} == MADE
  assert lm.small().entries == 136_896
  # A2SGD, Table I
  assert entries_of(lambda: lm.LSTM(10_000, 1500, nnx.Rngs(0))) == 66_034_000
  # SparDL, Table 2
  assert entries_of(lambda: images.VGG(images.VGG19, 100, nnx.Rngs(0))) == 20_086_692
  bert = sum(tensor.entries for tensor in architectures.bert_base())
  # Ok-Topk, Table 2: the decoder's weight is not tied
  assert bert + 768 * 30_522 == 133_547_324


def test_a_share_of_a_batch_depends_on_seed_step_and_worker_alone(tasks):
  batch_of = lambda task, seed, step, size: next(
    itertools.islice(task.stream(seed, size, 2), step, None)
  )
  for name, task in tasks.items():
    whole, again = batch_of(task, 1, 7, 3), batch_of(task, 1, 7, 2)
    for field in ("input", "label"):
      np.testing.assert_array_equal(whole[field][:4], again[field], err_msg=name)
    others = [
      batch_of(task, seed, step, 2)["input"] for seed, step in ((2, 7), (1, 8))
    ] + [whole["input"][2:]]
    assert not any(np.array_equal(other[:2], whole["input"][:2]) for other in others), (
      name
    )


def test_a_process_gives_its_share_of_windows_that_predict_each_next_byte():
  task, place = lm.small(), workers.here("sim", 2)
  first, again = (next(task.batches(0, place, 3)) for _ in range(2))
  assert first["input"].shape == first["label"].shape == (6, lm.LENGTH)
  np.testing.assert_array_equal(first["input"][:, 1:], first["label"][:, :-1])
  np.testing.assert_array_equal(first["input"], again["input"])
  for number in range(2):  # a rank of MPI gives its own share alone
    own = next(task.batches(0, place._replace(shares=1, number=number), 3))
    np.testing.assert_array_equal(
      own["input"], first["input"][3 * number : 3 * number + 3]
    )
  windows = lm.windows(np.arange(200, dtype=np.uint8))
  np.testing.assert_array_equal(windows[:, 1:].ravel(), np.arange(1, 193))


@pytest.mark.parametrize(
  ("load", "least"), [(text.library, 1_000_000), (text.help_topics, 200_000)]
)
def test_text_that_is_held_out_is_not_trained_on(load, least):
  source = load()
  train, held_out = (
    set(part.tobytes().split(b"\n\n")) for part in (source.train, source.held_out)
  )
  assert not train & held_out
  assert 0.05 < len(source.held_out) / len(source.train) < 0.2
  assert len(source.train) > least
  assert not np.any(source.train == 0)  # the byte that hides others


@pytest.mark.long
def test_masked_bytes_are_those_to_predict_and_labels_that_are_ignored_do_not_count(
  tasks,
):
  batch = next(tasks["bert"].stream(0, 1, 64))
  hidden = batch["label"] != IGNORED
  np.testing.assert_array_equal(batch["input"] == 0, hidden)
  assert 0.12 < hidden.mean() < 0.18
  logits, labels = jnp.eye(4)[None, :3] * 3, np.array([[0, IGNORED, 1]])
  losses, right, count = base._scores(logits, labels)
  np.testing.assert_allclose(
    losses, -jax.nn.log_softmax(logits[0])[(0, 2), (0, 1)].sum(), rtol=1e-6
  )
  assert (int(right), int(count)) == (1, 2)


@pytest.mark.long
@pytest.mark.parametrize(
  "make", [lm.LSTM, lambda _, width, rngs: lm.Transformer(rngs, width)]
)
def test_a_model_of_text_sees_no_later_byte(make):
  module, before = make(lm.BYTES, 8, nnx.Rngs(0)), np.zeros((1, 6), np.uint8)
  after = before.copy()
  after[0, 4] = 7
  changed = np.abs(np.asarray(module(before) - module(after))).max(-1)[0]
  assert not changed[:4].any()
  assert changed[4:].all()


def test_training_moves_running_statistics_and_evaluation_uses_them():
  inputs, labels = (
    np.array([[10.0, 0.0], [12.0, 0.0]], np.float32),
    np.array([0, 1], np.int32),
  )
  module = lambda _: nnx.BatchNorm(2, momentum=0.5, rngs=nnx.Rngs(0))
  task = Task(
    "norm", "two rows", module, drawn(lambda *_: (inputs, labels)), (inputs, labels)
  )
  model = model_of(task, seed=0)
  _, after = jax.jit(model.loss)(
    model.params, next(task.stream(0, 1, 2)), model.statistics
  )
  # half of the way from 0 to 11
  assert len([leaf for leaf in jax.tree.leaves(after) if float(leaf[0]) == 5.5]) == 1
  assert model.evaluate(model.params, after) != model.evaluate(
    model.params, model.statistics
  )


@pytest.mark.long
@pytest.mark.parametrize("name", ENTRIES)
def test_each_task_trains(tasks, name):
  (method,) = methods.parse("method", ["updates/spardl:density=0.1"], 2)
  recipe = recipes.Recipe(recipes.Optimizer("adam", 0.001), clip=1.0)
  task = tasks[name]._replace(held_out=tuple(part[:2] for part in tasks[name].held_out))
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    trainer = Trainer(
      task, method, recipe, workers.here("sim", 2), batch_size=2, seed=0
    )
    first = trainer.step()
    loss, accuracy = trainer.evaluate()
  assert np.isfinite([first, loss]).all()
  assert 0 <= accuracy <= 1
  assert first < 8  # about that of guessing, log 10 or log 256


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
  "name", quick_of(registry.MADE, quick=["adapters", "cartpole", "physics_apart"])
)
def test_dense_training_lowers_the_loss_on_what_is_held_out(name):
  setting = sweep.Setting(registry.make(name), workers=4, batch_size=16, steps=30)
  method, optimizer = sweep.parsed(sweep.RECIPES["dense"], setting.workers)
  model = model_of(setting.task, 0)
  with jax.numpy_rank_promotion("allow"):
    (curve,) = sweep.curves(setting, method, optimizer, [0.005], [0])
    before, _ = model.evaluate(model.params, model.statistics)
  assert 0 < curve.loss[-1] < 0.99 * before


@pytest.mark.parametrize("recipe", ["signs_4", "ef21"])
def test_a_sweep_has_the_curve_of_the_race(recipe):
  setting = sweep.Setting(registry.make("mlp"), workers=3, batch_size=4, steps=10)
  method, optimizer = sweep.parsed(sweep.RECIPES[recipe], setting.workers)
  recipe = setting.recipe(optimizer._replace(rate=0.01))
  place = workers.here("sim", setting.workers)
  losses, words, drifts = [], [], []
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    (curve,) = sweep.curves(setting, method, optimizer, [0.01], [1])
    trainer = Trainer(setting.task, method, recipe, place, 4, seed=1)
    for _ in range(setting.steps):
      trainer.step()
      metrics = trainer.metrics()
      words.append(metrics["words_sent"])
      drifts.append(metrics["drift"])
      losses.append(trainer.evaluate()[0])
  assert (curve.method, curve.optimizer) == (method.label, str(recipe.optimizer))
  assert curve.steps == [2, 4, 6, 8, 10]
  np.testing.assert_allclose(curve.loss, losses[1::2], rtol=2e-3)
  assert curve.words == np.mean(words)
  assert curve.drift == pytest.approx(max(drifts), rel=1e-4)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", ["recommender", "physics", "adapters", "mlp"])
def test_workers_have_data_of_their_own(name):
  """A worker has a fourth of the items, or of the square, or few classes."""
  batch = next(registry.make(f"{name}_apart").stream(0, 4, 64))
  of = {
    "recommender": lambda batch: batch["input"][:, 1] % 4,
    "physics": lambda batch: (4 * batch["input"][:, 0]).astype(int),
  }
  kinds = of.get(name, lambda batch: batch["label"])(batch).reshape(4, 64)
  if name in of:
    np.testing.assert_array_equal(kinds, np.arange(4)[:, None].repeat(64, 1))
  else:  # few classes
    assert np.mean([len(np.unique(row)) for row in kinds]) < 7


def test_minus_the_laplacian_of_a_potential():
  module = physics.Potential(nnx.Rngs(0))
  points = np.random.default_rng(0).random((5, 2)).astype(np.float32)

  def potential(point):
    x = 2 * point - 1
    for layer in module.layers:
      x = jnp.tanh(x @ layer.kernel[...] + layer.bias[...])
    x = x @ module.head.kernel[...] + module.head.bias[...]
    return 16 * jnp.prod(point * (1 - point)) * x[0]

  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    expected = [-jnp.trace(jax.hessian(potential)(point)) for point in points]
    np.testing.assert_allclose(module(points), expected, rtol=1e-3)


def test_a_pole_falls_as_in_barto_sutton_and_anderson():
  """Their equations in numpy, of a cart of 1 kg, a pole of 0.1 kg and half a metre to its middle."""
  place, speed, angle, turn = 0.1, -0.2, 0.05, 0.3
  force, masses = -10.0, 1.1
  common = (force + 0.1 * 0.5 * turn**2 * np.sin(angle)) / masses
  fall = (9.8 * np.sin(angle) - np.cos(angle) * common) / (
    0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / masses)
  )
  push = common - 0.1 * 0.5 * fall * np.cos(angle) / masses
  state = np.array([place, speed, angle, turn])
  expected = state + 0.02 * np.array([speed, push, turn, fall])
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    found = cartpole.move(jnp.asarray(state[None]), jnp.array([False]))
  np.testing.assert_allclose(found[0], expected, rtol=1e-5)


def test_cifar10(tmp_path):
  random = np.random.default_rng(0)
  for name in data.CIFAR10_FILES:
    raw = np.concatenate(
      [random.integers(0, 10, (4, 1)), random.integers(0, 256, (4, 3072))], 1
    ).astype(np.uint8)
    raw.tofile(tmp_path / name)
  loaded = data.load("cifar10", str(tmp_path))
  assert (loaded.train_images.shape, loaded.test_images.shape) == (
    (20, 32, 32, 3),
    (4, 32, 32, 3),
  )
  np.testing.assert_array_equal(loaded.test_labels, raw[:, 0])
  np.testing.assert_allclose(
    [loaded.train_images.mean(), loaded.train_images.std()], [0, 1], atol=1e-4
  )
  planes = raw[0, 1:].reshape(3, 32, 32).astype(float)  # red, green, blue, row by row
  np.testing.assert_allclose(
    np.corrcoef(loaded.test_images[0, :, :, 1].ravel(), planes[1].ravel())[0, 1], 1
  )
  for corrupt in (raw.ravel()[:-1], np.full(3073, 10, np.uint8), raw[:0]):
    corrupt.tofile(tmp_path / "data_batch_2.bin")
    with pytest.raises(
      ValueError, match="CIFAR-10: .*data_batch_2.bin is not records of 3073 bytes"
    ):
      data.load("cifar10", str(tmp_path))


def test_the_folds_test_every_digit_once_and_epochs_are_the_same_again():
  first, *others = (data.load("digits", fold=fold, folds=4) for fold in range(4))
  counts = sum(np.bincount(fold.test_labels, minlength=10) for fold in (first, *others))
  np.testing.assert_array_equal(
    counts, np.bincount(np.concatenate([first.train_labels, first.test_labels]))
  )
  streams = (
    data.epochs(first.train_images, first.train_labels)(3, 6, 16) for _ in range(2)
  )
  for one, other in itertools.islice(zip(*streams, strict=True), 20):
    np.testing.assert_array_equal(one["label"], other["label"])

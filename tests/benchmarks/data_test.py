"""The CIFAR-10 reader on small files of the real format, and on files that are not."""

import pickle

import numpy as np
import pytest

from benchmarks.tasks import data


def write(folder, name, content):
  folder.mkdir(parents=True, exist_ok=True)
  (folder / name).write_bytes(content if isinstance(content, bytes) else pickle.dumps(content, protocol=2))


def batch(seed, count=4):
  random = np.random.default_rng(seed)
  return {
    b"batch_label": b"a small one",
    b"labels": random.integers(0, 10, count).tolist(),
    b"data": random.integers(0, 256, (count, 3072), dtype=np.uint8),
    b"filenames": [b"x.png"] * count,
  }


@pytest.fixture(params=["", "cifar-10-batches-py"])
def folder(tmp_path, request):
  for seed, name in enumerate(data.CIFAR10_FILES):
    write(tmp_path / request.param, name, batch(seed))
  return tmp_path, tmp_path / request.param


def test_cifar10(folder):
  loaded = data.load("cifar10", str(folder[0]))
  assert loaded.train_images.shape == (20, 32, 32, 3)
  assert loaded.test_images.shape == (4, 32, 32, 3)
  assert (loaded.train_images.dtype, loaded.train_labels.dtype) == (np.float32, np.int32)
  np.testing.assert_array_equal(loaded.test_labels, batch(5)[b"labels"])
  np.testing.assert_allclose([loaded.train_images.mean(), loaded.train_images.std()], [0, 1], atol=1e-4)
  planes = batch(5)[b"data"][0].reshape(3, 32, 32).astype(float)  # red, green, blue, row by row
  np.testing.assert_allclose(np.corrcoef(loaded.test_images[0, :, :, 1].ravel(), planes[1].ravel())[0, 1], 1)


def test_missing_files_are_named(folder):
  (folder[1] / "data_batch_3").unlink()
  with pytest.raises(FileNotFoundError, match="has no data_batch_3; expected the files of the python version"):
    data.load("cifar10", str(folder[0]))


def test_missing_folder(tmp_path):
  with pytest.raises(FileNotFoundError, match="has no data_batch_1, data_batch_2"):
    data.load("cifar10", str(tmp_path / "nowhere"))
  with pytest.raises(ValueError, match="needs --data_dir"):
    data.load("cifar10")
  with pytest.raises(ValueError, match="unknown dataset 'mnist', choose one of digits, cifar10"):
    data.load("mnist")


class Runs:
  def __reduce__(self):
    return print, ("a pickle must not run this",)


@pytest.mark.parametrize(
  "content",
  [
    b"",
    b"not a pickle",
    pickle.dumps(batch(0), protocol=2)[:500],
    {b"data": np.zeros((4, 3072), np.uint8)},
    {b"data": np.zeros((4, 3071), np.uint8), b"labels": [0] * 4},
    {b"data": np.zeros((4, 3072), np.float32), b"labels": [0] * 4},
    {b"data": np.zeros((4, 3072), np.uint8), b"labels": [0] * 3},
    {b"data": np.zeros((4, 3072), np.uint8), b"labels": [10] * 4},
    [1, 2],
    Runs(),
  ],
)
def test_corrupt_files(folder, content, capsys):
  write(folder[1], "data_batch_2", content)
  with pytest.raises(ValueError, match="CIFAR-10: .*data_batch_2"):
    data.load("cifar10", str(folder[0]))
  assert "must not run" not in capsys.readouterr().out


def test_the_folds_test_every_digit_once():
  tested = [data.load("digits", fold=fold, folds=4) for fold in range(4)]
  assert sum(len(fold.test_labels) for fold in tested) == 1797
  assert all(len(fold.train_labels) + len(fold.test_labels) == 1797 for fold in tested)
  counts = sum(np.bincount(fold.test_labels, minlength=10) for fold in tested)
  np.testing.assert_array_equal(counts, np.bincount(np.concatenate([tested[0].train_labels, tested[0].test_labels])))
  with pytest.raises(ValueError, match="fold=4 of folds=4, choose at least two folds, and one of them"):
    data.load("digits", fold=4, folds=4)


def test_digits_and_batches():
  loaded = data.load("digits")
  assert loaded.train_images.shape[1:] == (8, 8, 1)
  assert len(loaded.train_images) + len(loaded.test_images) == 1797
  first, again = (data.epochs(loaded.train_images, loaded.train_labels)(3, 6, 16) for _ in range(2))
  for _ in range(20):
    np.testing.assert_array_equal(next(first)["label"], next(again)["label"])
  with pytest.raises(ValueError, match="batch of 2000 does not fit"):
    data.epochs(loaded.train_images, loaded.train_labels)(0, 4, 500)

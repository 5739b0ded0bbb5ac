"""The law of the chain: whatever is written, lost, changed or killed, a reader has a published version or a refusal."""

import collections
import contextlib
import errno
import functools
import http.server
import io
import itertools
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading

import fsspec
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from hypothesis import stateful
from jax.sharding import NamedSharding, PartitionSpec

import jaxsparse as js
from jaxsparse import launch
from jaxsparse.weights import files
from tests.cases import bits

N = 20_000  # entries


def versions(count, seed=0, changes=2000):
  """u16 patterns of bfloat16 weights, a few of which change from one to the next, NaN and -0.0 among them."""
  random = np.random.default_rng(seed)
  weights = random.integers(0, 2**16, N, dtype=np.uint16)
  for _ in range(count):
    yield weights
    weights = weights.copy()
    near = random.integers(-2, 3, changes).astype(np.uint16)
    weights[random.choice(N, changes, replace=False)] += near
    weights[random.integers(N)] = random.choice([0x8000, 0x7FC1, 0xFF81, 0])


def params_of(patterns):
  weights = patterns.view(ml_dtypes.bfloat16)
  return {"w": weights[:-1].reshape(-1), "b": weights[-1]}


def patterns_of(params):
  return np.append(bits(params["w"]), bits(params["b"])).astype(np.uint16)


LIKE = params_of(np.zeros(N, np.uint16))


def publish(folder, count, seed=0, changes=2000):
  """The published patterns by their numbers."""
  publisher = js.weights.Publisher(folder, LIKE)
  return {
    publisher.publish(params_of(patterns)): patterns
    for patterns in versions(count, seed, changes)
  }


def check_is_published(latest, published):
  np.testing.assert_array_equal(patterns_of(latest.params), published[latest.version])


def inside(folder):
  """The folder of the only model."""
  (own,) = folder.iterdir()
  return own


def opened(path):
  """A folder as `jaxsparse.weights.files` takes it."""
  return DirFileSystem(str(path), fsspec.filesystem("file"))


def names_in(path):
  return files.names(opened(path))


def names_of(folder, kind):
  return [name for name in names_in(inside(folder)) if name.kind == kind]


def size_of(folder, name):
  return (inside(folder) / str(name)).stat().st_size


def test_readers_follow_links_and_newcomers_begin_with_the_anchor(tmp_path):
  publisher = js.weights.Publisher(tmp_path, LIKE)
  follower = js.weights.Subscriber(tmp_path, LIKE)
  patterns = list(versions(30))
  for number, one in enumerate(patterns, 1):
    assert publisher.publish(params_of(one)) == publisher.version == number
    latest = follower.latest()
    assert (latest.version, follower.refused) == (number, [])
    np.testing.assert_array_equal(patterns_of(latest.params), one)
    newcomer = js.weights.Subscriber(tmp_path, LIKE).latest()
    assert newcomer.version == number
    np.testing.assert_array_equal(patterns_of(newcomer.params), one)
  assert follower.latest() is latest
  anchors, links = names_of(tmp_path, "anchor"), names_of(tmp_path, "link")
  assert anchors[-1].version > 20
  assert len(anchors) == 2
  # Between two anchors there are links of about an anchor's size.
  size = lambda name: size_of(tmp_path, name)
  between = [name for name in links if name.version <= anchors[1].version]
  assert 0.9 * 2 * N < sum(map(size, between)) < 1.3 * 2 * N
  # Behind the older anchor every link is there.
  assert [name.version for name in links] == [*range(anchors[0].version + 1, 31)]


def test_files_of_links_are_at_most_those_of_an_anchor(tmp_path):
  """Of changes of one entry headers are most of the bytes."""
  weights = np.zeros(2000, np.float32)
  publisher = js.weights.Publisher(tmp_path, weights)
  for number in range(80):
    weights[number] = 1
    publisher.publish(weights)
  anchors, links = names_of(tmp_path, "anchor"), names_of(tmp_path, "link")
  older, newer = (anchor.version for anchor in anchors)
  between = [name for name in links if older < name.version < newer]
  total = sum(size_of(tmp_path, name) for name in between)
  anchor = size_of(tmp_path, anchors[1])
  assert anchor - 300 < total <= anchor


def test_an_anchor_is_due_by_the_bytes_of_all_processes(tmp_path, monkeypatch):
  """Of another process without shards: what it writes is headers, more than its part of an anchor."""

  def gather(excess):
    # Bits are gathered: a process without a link has infinity, a float.
    assert np.asarray(excess).dtype == np.float64
    return np.array([excess, 100.0])

  monkeypatch.setattr("jax.experimental.multihost_utils.process_allgather", gather)
  publish(tmp_path, 5)
  assert [name.version for name in names_of(tmp_path, "anchor")] == [1]


def test_an_error_of_one_process_is_one_of_all(tmp_path, monkeypatch):
  """Who fails before it writes tells the others, which would wait for it."""
  told, others = [], [0.0]
  gather = lambda excess: told.append(excess) or np.array([excess, *others])
  monkeypatch.setattr("jax.experimental.multihost_utils.process_allgather", gather)
  publisher = js.weights.Publisher(tmp_path, LIKE)
  first, second, third = versions(3)
  publisher.publish(params_of(first))
  with monkeypatch.context() as patch:
    patch.setattr(files, "complete_versions", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
      publisher.publish(params_of(second))
  assert np.isnan(told[-1])
  others[:] = [np.nan]
  with pytest.raises(OSError, match="another process failed: version 3 is not written"):
    publisher.publish(params_of(second))
  assert [name.version for name in names_in(inside(tmp_path))] == [1]
  others[:] = [0.0]
  assert publisher.publish(params_of(third)) == 4
  check_is_published(js.weights.Subscriber(tmp_path, LIKE).latest(), {4: third})


def test_a_reader_that_fell_behind_what_is_kept_begins_with_an_anchor(tmp_path):
  publisher = js.weights.Publisher(tmp_path, LIKE)
  reader = js.weights.Subscriber(tmp_path, LIKE)
  published = {}
  for number, one in enumerate(versions(60), 1):
    published[publisher.publish(params_of(one))] = one
    if number in (3, 60):
      assert reader.latest().version == number
      check_is_published(reader.latest(), published)
  first, second = names_of(tmp_path, "anchor")
  assert names_of(tmp_path, "link")[0].version >= first.version > 4
  # A newest anchor that is damaged is not needed.
  (inside(tmp_path) / str(second)).write_bytes(b"")
  newcomer = js.weights.Subscriber(tmp_path, LIKE)
  assert newcomer.latest().version == 60
  check_is_published(newcomer.latest(), published)


def test_large_changes_are_anchors_alone(tmp_path):
  publisher = js.weights.Publisher(tmp_path, LIKE)
  reader = js.weights.Subscriber(tmp_path, LIKE)
  for seed in range(3):
    (one,) = versions(1, seed)
    publisher.publish(params_of(one))
    check_is_published(reader.latest(), {seed + 1: one})
  assert names_of(tmp_path, "link") == []


DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
DTYPES += ["int8", "uint8", "int16", "int32", "uint32", "bool", "complex64", "int4"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_kept_bit_for_bit(dtype, tmp_path):
  """Any bits, and changes of one bit anywhere; nested leaves, one of them empty, some scalar."""
  dtype = jnp.dtype(dtype)
  random = np.random.default_rng(0)

  def weights(raw):
    if dtype == np.bool_ or dtype.name == "int4":
      return (raw[: raw.size // dtype.itemsize] & 1).astype(dtype)
    return raw.view(dtype)

  raw = random.integers(0, 256, 8 * 700, dtype=np.uint8)
  tree = lambda flat: {
    "a": [jnp.asarray(flat[:500].reshape(5, 100)), (jnp.asarray(flat[500]),)],
    "b": {"none": jnp.asarray(flat[:0].reshape(0, 3)), "c": jnp.asarray(flat[501:700])},
  }
  like = jax.eval_shape(lambda: tree(jnp.zeros(700, dtype)))
  publisher = js.weights.Publisher(tmp_path, like, dtype=None)
  reader = js.weights.Subscriber(tmp_path, like, dtype=None)
  for _ in range(6):
    params = tree(weights(raw))
    publisher.publish(params)
    got = reader.latest().params
    assert reader.refused == []
    assert jax.tree.structure(got) == jax.tree.structure(params)
    for one, wanted in zip(*map(jax.tree.leaves, (got, params)), strict=True):
      assert (one.dtype, one.shape) == (wanted.dtype, wanted.shape)
      assert np.asarray(one).tobytes() == np.asarray(wanted).tobytes()
    raw[random.integers(0, raw.size, 20)] ^= np.uint8(1) << random.integers(
      0, 8, 20, dtype=np.uint8
    )
  assert len(names_of(tmp_path, "link")) >= 3


def test_floats_are_served_in_the_dtype_and_integers_stay(tmp_path):
  params = {"w": jnp.linspace(0, 1, 100), "step": jnp.int32(2**24 + 1), "rate": 0.1}
  js.weights.Publisher(tmp_path, params).publish(params)
  got = js.weights.Subscriber(tmp_path, params).latest().params
  assert got["step"] == 2**24 + 1
  assert got["rate"] == jnp.bfloat16(0.1)
  np.testing.assert_array_equal(bits(got["w"]), bits(params["w"].astype("bfloat16")))


@pytest.mark.parametrize("dtype", ["int8", "bool", np.complex64])
def test_a_serving_dtype_is_a_floating_one(dtype, tmp_path):
  for kind in (js.weights.Publisher, js.weights.Subscriber):
    with pytest.raises(ValueError, match=r"dtype=.*, choose a floating-point dtype"):
      kind(tmp_path, LIKE, dtype)


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64", "complex128"])
def test_a_leaf_that_jax_narrows_is_refused(dtype, tmp_path):
  wide = {"w": LIKE["w"], "step": np.zeros(3, dtype)}
  narrow = jax.tree.map(jnp.asarray, wide)
  publisher = js.weights.Publisher(tmp_path, narrow, None)
  match = rf"\['step'\] would be served in {dtype}, which JAX narrows to {narrow['step'].dtype}"
  for call in (
    lambda: publisher.publish(wide),
    lambda: js.weights.Publisher(tmp_path, wide, None),
    lambda: js.weights.Subscriber(tmp_path, wide, None),
    lambda: js.weights.Subscriber(
      tmp_path, {"step": jax.ShapeDtypeStruct((), np.dtype(dtype))}, None
    ),
  ):
    with pytest.raises(ValueError, match=match):
      call()
  assert list(tmp_path.iterdir()) == []
  if dtype == "float64":
    with pytest.raises(ValueError, match="float64"):
      js.weights.Publisher(tmp_path, LIKE, dtype)
    # A serving dtype is no silent change.
    assert js.weights.Publisher(tmp_path, wide).publish(wide) == 1
  with jax.enable_x64(True):
    assert js.weights.Publisher(tmp_path, wide, None).publish(wide) == 1
    got = js.weights.Subscriber(tmp_path, wide, None).latest().params
    assert got["step"].dtype == dtype


def test_sharded_leaves_and_donated_ones(tmp_path):
  """A shard is written once, and readers may have other shardings; a trainer may donate what it publishes."""
  mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4])
  put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
  weights = np.random.default_rng(0).integers(0, 2**16, (40, 60), dtype=np.uint16)
  weights = weights.view(ml_dtypes.bfloat16)
  params = {
    "both": put(weights, "x", "y"),
    "rows": put(weights, "y"),
    "all": put(weights),
  }
  like = {"both": put(weights), "rows": put(weights, "x", "y"), "all": weights}
  flip = lambda x: jnp.where((abs(x) > 1) & (abs(x) < 4), -x, x)
  change = jax.jit(lambda tree: jax.tree.map(flip, tree), donate_argnums=0)
  publisher = js.weights.Publisher(tmp_path, params)
  reader = js.weights.Subscriber(tmp_path, like)
  for _ in range(4):
    wanted = jax.tree.map(np.array, params)
    publisher.publish(params)
    params = jax.block_until_ready(change(params))
    got = reader.latest().params
    for name, leaf in got.items():
      np.testing.assert_array_equal(bits(leaf), bits(wanted[name]))
    assert got["rows"].sharding == like["rows"].sharding
  _, arrays = files.read(opened(inside(tmp_path)), names_of(tmp_path, "anchor")[0])
  assert sum(array.nbytes for array in arrays) == 3 * weights.nbytes


def test_changes_of_published_arrays_change_nothing(tmp_path):
  """Of numpy, which a trainer may overwrite."""
  weights = np.zeros(N, np.float32)
  publisher = js.weights.Publisher(tmp_path, weights, None)
  reader = js.weights.Subscriber(tmp_path, weights, None)
  for number in range(3):
    weights[number] = 1
    publisher.publish(weights)
    np.testing.assert_array_equal(reader.latest().params, weights)


def copy_of(folder, name):
  shutil.copytree(folder, folder.with_name(name))
  return folder.with_name(name)


def test_what_is_damaged_is_refused_by_name(tmp_path, subtests):
  """Each region of a link and of an anchor: flipped, cut off, foreign, of another name, gone."""
  folder = tmp_path / "whole"
  published = publish(folder, 9)
  (anchor,), links = names_of(folder, "anchor"), names_of(folder, "link")
  assert [name.version for name in links] == list(range(2, 10))
  for name in (anchor, links[0], links[3], links[-1]):
    content = (inside(folder) / str(name)).read_bytes()
    header = 32 + int.from_bytes(content[24:32], "big")
    flip = lambda at, content=content: (
      content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]
    )
    regions = (3, 17, 30, 40, header - 3, header + 1, len(content) - 1)
    changed = {f"flip {at}": flip(at) for at in regions}
    changed |= {
      f"cut {at}": content[:at] for at in (0, 20, 40, header, len(content) - 1)
    }
    changed |= {"longer": content + b"\0", "foreign": b"weights of another kind" * 9}
    other = links[1] if name is not links[1] else links[2]
    changed |= {"other": (inside(folder) / str(other)).read_bytes(), "gone": None}
    for what, new in changed.items():
      with subtests.test(f"{name.kind} {name.version}: {what}"):
        own = copy_of(folder, "damaged")
        try:
          check_damaged(own, name, new, published)
        finally:
          shutil.rmtree(own)


def check_damaged(folder, name, content, published):
  """A newcomer, a reader just before the file, and one behind it."""
  own = inside(folder)
  path = own / str(name)
  behind = js.weights.Subscriber(folder, LIKE)
  assert behind.latest().version == 9
  before = path.read_bytes()
  for later in names_in(own):
    if later.version >= name.version > 1:
      (own / str(later)).rename(own / f"away {later}")
  early = js.weights.Subscriber(folder, LIKE)
  early.latest()
  for away in own.glob("away *"):
    away.rename(own / away.name.removeprefix("away "))
  newcomer = js.weights.Subscriber(folder, LIKE)
  if content is None:
    path.unlink()
  else:
    path.write_bytes(content)
  # Without the newest file the reader is ahead of the folder.
  is_ahead = content is None and name.version == 9
  assert behind.latest().version == 9 - is_ahead
  check_is_published(behind.latest(), published)
  if name.kind == "anchor":
    with pytest.raises(LookupError, match=str(name) if content is not None else None):
      newcomer.latest()
    assert early.latest().version == 9
  else:
    for reader in (newcomer, early):
      latest = reader.latest()
      assert latest.version == name.version - 1
      check_is_published(latest, published)
      if content is not None:
        assert any(str(name) in reason for reason in reader.refused)
      # Where the newest file is gone, nothing says that it was there.
      elif not is_ahead:
        assert reader.refused == [f"version {name.version} has no whole link"]
  path.write_bytes(before)
  for reader in (newcomer, early):
    assert reader.latest().version == 9
    check_is_published(reader.latest(), published)


def reseal(folder, name):
  """The file with another digest of the version in its header, and a digest of the file that is right."""
  header, arrays = files.read(opened(folder), name)
  files.write(opened(folder), name, header | {"digest": 12345}, arrays)


def test_the_digest_of_a_version_proves_what_whole_files_hold(tmp_path):
  published = publish(tmp_path / "a", 4)
  names = names_in(inside(tmp_path / "a"))
  for name in names:
    own = copy_of(tmp_path / "a", f"digest {name}")
    newest = inside(own) / str(names[-1])
    newest.rename(own / "away")
    reader, follower = (js.weights.Subscriber(own, LIKE) for _ in range(2))
    assert follower.latest().version == 3
    (own / "away").rename(newest)
    reseal(inside(own), name)
    with pytest.raises(LookupError, match="has another digest"):
      reader.latest()
    assert follower.latest().version == (3 if name == names[-1] else 4)
    check_is_published(follower.latest(), published)


def test_a_link_of_another_branch_is_refused(tmp_path):
  """Two folders of the same publisher that went on apart, as after a copy: the numbers are those of both."""
  a, b = tmp_path / "a", tmp_path / "b"
  published = publish(a, 4)
  publish(b, 4, seed=1)
  (of_a,), (of_b,) = ({name.run for name in names_in(inside(one))} for one in (a, b))
  reader = js.weights.Subscriber(a, LIKE)
  reader.latest()
  foreign = files.Name(4, of_b, 0, 1, "link")
  header, arrays = files.read(opened(inside(b)), foreign)
  files.write(opened(inside(a)), foreign._replace(version=5, run=of_a), header, arrays)
  assert reader.latest().version == 4
  assert "follows another version 4" in reader.refused[0]
  check_is_published(reader.latest(), published)


def test_a_publisher_that_begins_again_writes_an_anchor(tmp_path):
  published = publish(tmp_path, 3)
  reader = js.weights.Subscriber(tmp_path, LIKE)
  assert reader.latest().version == 3
  again = js.weights.Publisher(tmp_path, LIKE)
  for number, one in enumerate(versions(3, seed=5), 4):
    published[again.publish(params_of(one))] = one
    assert reader.latest().version == number
    check_is_published(reader.latest(), published)
  # Files of a run that has ended go with the second anchor.
  for one in versions(40, seed=6, changes=4000):
    again.publish(params_of(one))
  assert names_in(inside(tmp_path))[0].version > 4


def test_a_reader_that_is_ahead_goes_back_to_what_the_folder_has(tmp_path):
  publisher = js.weights.Publisher(tmp_path / "a", LIKE)
  reader = js.weights.Subscriber(tmp_path / "a", LIKE)
  published = {}
  for number, one in enumerate(versions(4), 1):
    if number == 3:
      early = copy_of(tmp_path / "a", "early")
    published[publisher.publish(params_of(one))] = one
  assert reader.latest().version == 4
  shutil.rmtree(tmp_path / "a")
  assert reader.latest().version == 4
  assert "No such file" in reader.refused[0]
  early.rename(tmp_path / "a")
  assert reader.latest().version == 2
  check_is_published(reader.latest(), published)


@pytest.mark.parametrize("count", [1, 3])
def test_a_folder_made_anew_has_other_versions_of_the_same_numbers(tmp_path, count):
  """By trainers of which each has a larger or a smaller run than the last one."""
  reader = js.weights.Subscriber(tmp_path, LIKE)
  assert reader.refused == []
  runs = set()
  for seed in range(6):
    published = publish(tmp_path, count, seed)
    check_is_published(reader.latest(), published)
    assert (reader.latest().version, reader.refused) == (count, [])
    runs.add(names_of(tmp_path, "anchor")[0].run)
    shutil.rmtree(inside(tmp_path))
  # random, of so many bits that two are not equal
  assert len(runs) == 6
  assert max(runs) - min(runs) > 2**20


def begin_two(folder, count):
  """A publisher of the first of `count` versions, one that has published nothing, and the other versions."""
  first = js.weights.Publisher(folder, LIKE)
  one, *others = versions(count)
  first.publish(params_of(one))
  return first, js.weights.Publisher(folder, LIKE), others


@pytest.mark.parametrize("between", [0, 1, 3])
def test_two_publishers(tmp_path, between):
  """The first one is refused after the second one has begun; readers go on with the second one."""
  first, second, (two, three, *others) = begin_two(tmp_path, 3 + between)
  # The first goes on until then.
  for other in others:
    first.publish(params_of(other))
  second.publish(params_of(two))
  number = 2 + between
  with pytest.raises(
    ValueError, match=rf"has {number:012}-\d+-0-1.anchor: another publi"
  ):
    first.publish(params_of(three))
  reader = js.weights.Subscriber(tmp_path, LIKE)
  check_is_published(reader.latest(), {number: two})
  second.publish(params_of(three))
  check_is_published(reader.latest(), {number + 1: three})


def test_two_publishers_do_not_write_to_the_same_unfinished_file(tmp_path, monkeypatch):
  """The former one publishes while the later one writes its first version."""
  first, second, (two, three) = begin_two(tmp_path, 3)
  sync = os.fsync

  def late(file):
    monkeypatch.undo()
    assert first.publish(params_of(three)) == 2
    sync(file)

  monkeypatch.setattr(os, "fsync", late)
  assert second.publish(params_of(two)) == 2
  reader = js.weights.Subscriber(tmp_path, LIKE)
  check_is_published(reader.latest(), {2: two})
  assert reader.refused == []


def test_an_unfinished_file_of_a_former_publisher_is_removed(tmp_path, monkeypatch):
  """Its next version is refused."""
  first, second, (two, three) = begin_two(tmp_path, 3)
  replace = os.replace

  def late(*paths):
    monkeypatch.undo()
    second.publish(params_of(two))
    replace(*paths)

  monkeypatch.setattr(os, "replace", late)
  with pytest.raises(FileNotFoundError):
    first.publish(params_of(three))
  with pytest.raises(ValueError, match="another publisher"):
    first.publish(params_of(three))
  reader = js.weights.Subscriber(tmp_path, LIKE)
  check_is_published(reader.latest(), {2: two})
  assert reader.refused == []


def test_a_trainer_that_is_started_again_and_again_leaves_few_anchors(tmp_path):
  for start in range(12):
    publisher = js.weights.Publisher(tmp_path, LIKE)
    for one in versions(2, seed=start):
      number = publisher.publish(params_of(one))
  assert [name.version for name in names_of(tmp_path, "anchor")] == [21, 23]
  assert js.weights.Subscriber(tmp_path, LIKE).latest().version == number == 24


def test_where_the_first_anchor_of_a_trainer_is_damaged_the_versions_before_are_read(
  tmp_path,
):
  published = publish(tmp_path, 3)
  reader = js.weights.Subscriber(tmp_path, LIKE)
  again = js.weights.Publisher(tmp_path, LIKE)
  four, five = versions(2, seed=5)
  again.publish(params_of(four))
  anchor = inside(tmp_path) / str(names_of(tmp_path, "anchor")[-1])
  content = anchor.read_bytes()
  anchor.write_bytes(content[:-9])
  for one in (reader, js.weights.Subscriber(tmp_path, LIKE)):
    for _ in range(2):
      assert one.latest().version == 3
      assert anchor.name in one.refused[0]
    check_is_published(one.latest(), published)
  anchor.write_bytes(content)
  again.publish(params_of(five))
  assert reader.latest().version == 5
  check_is_published(reader.latest(), {5: five})


@pytest.mark.parametrize("what", ["folder", "files"])
def test_a_publisher_whose_folder_is_emptied_goes_on_with_an_anchor(tmp_path, what):
  publisher = js.weights.Publisher(tmp_path, LIKE)
  one, two, three, four = versions(4)
  publisher.publish(params_of(one))
  publisher.publish(params_of(two))
  if what == "folder":
    shutil.rmtree(inside(tmp_path))
  else:
    for path in inside(tmp_path).iterdir():
      path.unlink()
  publisher.publish(params_of(three))
  reader = js.weights.Subscriber(tmp_path, LIKE)
  check_is_published(reader.latest(), {3: three})
  publisher.publish(params_of(four))
  check_is_published(reader.latest(), {4: four})


def test_parameters_in_another_order_are_refused(tmp_path):
  """Their leaves would change places."""
  a, b = jnp.zeros(3), jnp.ones(3)
  publisher = js.weights.Publisher(tmp_path, {"a": a, "b": b})
  publisher.publish({"a": a, "b": b})
  with pytest.raises(ValueError, match="params_like: another order"):
    publisher.publish(collections.OrderedDict(b=b, a=a))
  publisher.publish(collections.OrderedDict(a=b, b=a))
  latest = js.weights.Subscriber(tmp_path, {"a": a, "b": b}).latest()
  assert latest.params["a"].tolist() == [1, 1, 1]


def test_parameters_that_are_sharded_otherwise_than_before(tmp_path):
  """Also where so few entries change that links would be shorter than anchors."""
  mesh = jax.make_mesh((4,), ("x",))
  like = jnp.zeros((64, 64), jnp.bfloat16)
  publisher = js.weights.Publisher(tmp_path, like)
  reader = js.weights.Subscriber(tmp_path, like)
  specs = [("x",), (None, "x"), (None, "x"), (), (("x",), None)]
  for number, spec in enumerate(specs, 1):
    params = like.at[number, 0].set(number)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    publisher.publish(jax.device_put(params, sharding))
    for each in (reader, js.weights.Subscriber(tmp_path, like)):
      latest = each.latest()
      assert (latest.version, each.refused) == (number, [])
      np.testing.assert_array_equal(latest.params, params)


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  publisher = js.weights.Publisher("here", LIKE)
  reader = js.weights.Subscriber("here", LIKE)
  monkeypatch.chdir("/")
  (one,) = versions(1)
  publisher.publish(params_of(one))
  check_is_published(reader.latest(), {1: one})
  assert (tmp_path / "here").is_dir()


def test_two_publishers_that_write_at_the_same_time(tmp_path, monkeypatch):
  """Each has seen no file of the other before: the one that has begun later goes on."""
  first, second, (two, three, four) = begin_two(tmp_path, 4)
  write = files.write

  def late(folder, name, *content):
    monkeypatch.undo()
    second.publish(params_of(two))
    return write(folder, name, *content)

  monkeypatch.setattr(files, "write", late)
  assert first.publish(params_of(three)) == second.version == 2
  reader = js.weights.Subscriber(tmp_path, LIKE)
  check_is_published(reader.latest(), {2: two})
  second.publish(params_of(four))
  check_is_published(reader.latest(), {3: four})
  with pytest.raises(ValueError, match="another publisher"):
    first.publish(params_of(three))


def test_other_models_and_dtypes_are_refused_by_name(tmp_path):
  """Each has versions of its own in a folder; parameters of another model are not published."""
  published = publish(tmp_path, 2)
  for other, dtype in (
    (LIKE, "float16"),
    (LIKE, None),
    (LIKE | {"w": np.zeros(3)}, "bfloat16"),
    (LIKE | {"x": np.zeros(3)}, "bfloat16"),
  ):
    reader = js.weights.Subscriber(tmp_path, other, dtype)
    there = r"dtypes and models there: .*/bfloat16-[0-9a-f]+'"
    with pytest.raises(LookupError, match=rf"No such file .*/{dtype}-.*; {there}"):
      reader.latest()
    assert js.weights.Publisher(tmp_path, other, dtype).publish(other) == 1
    assert reader.latest().version == 1
  publisher = js.weights.Publisher(tmp_path, LIKE)
  leaves = re.escape("params_like: [\"['b'] bfloat16[2]\", \"['b'] bfloat16[]\"]")
  with pytest.raises(ValueError, match=leaves):
    publisher.publish(LIKE | {"b": np.zeros(2)})
  check_is_published(js.weights.Subscriber(tmp_path, LIKE).latest(), published)
  for kind in (js.weights.Publisher, js.weights.Subscriber):
    with pytest.raises(ValueError, match="Protocol not known: tcp"):
      kind("tcp://a:1", LIKE)
    with pytest.raises(ImportError, match="Install s3fs"):
      kind("s3://a", LIKE)
    with pytest.raises(ValueError, match="s3:/a is an address: give a string"):
      kind(pathlib.Path("s3://a"), LIKE)
    with pytest.raises(TypeError, match="params_like"):
      kind(tmp_path, {"w": "no array"})


def test_a_bucket_holds_versions_as_a_folder_does():
  """Objects in memory, as fsspec has them: without files, renames and `fsync`."""
  address = "memory://bucket/run"
  publisher = js.weights.Publisher(address, LIKE)
  follower = js.weights.Subscriber(address, LIKE)
  published = {}
  for patterns in versions(30, changes=8000):
    number = publisher.publish(params_of(patterns))
    published[number] = patterns
    for reader in (follower, js.weights.Subscriber(address, LIKE)):
      check_is_published(reader.latest(), published)
      assert reader.latest().version == number
      assert reader.refused == []
  names = files.names(publisher._folder)
  assert names[0].version > 1  # what is not needed was removed
  assert len(publisher._folder.ls("")) == len(names)
  publisher._folder.rm(str(names[-1]))
  newcomer = js.weights.Subscriber(address, LIKE)
  assert newcomer.latest().version == 29
  check_is_published(newcomer.latest(), published)


def test_readers_at_the_address_of_a_server(tmp_path):
  """Of the standard library; a file that does not come whole, or an error of the server, is refused."""
  answers = []  # what the server does with requests of files, before it answers as usual

  class Handler(http.server.SimpleHTTPRequestHandler):
    def do_GET(self):
      if answers and "link" in self.path:
        answers.pop()(self)
      else:
        super().do_GET()

    def refuse(self):
      self.send_error(503)

    def close_in_a_file(self):
      self.send_response(200)
      self.send_header("Content-Length", "1000")
      self.end_headers()
      self.wfile.write(b"half of it")

    def log_message(self, *_):
      pass

  handler = functools.partial(Handler, directory=tmp_path)
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    reader = js.weights.Subscriber(f"http://127.0.0.1:{server.server_port}", LIKE)
    with pytest.raises(LookupError, match="models there: "):
      reader.latest()
    publisher = js.weights.Publisher(tmp_path, LIKE)
    first, *rest = versions(4)
    published = {publisher.publish(params_of(first)): first}
    check_is_published(reader.latest(), published)
    for patterns, answer in zip(
      rest, (Handler.close_in_a_file, Handler.refuse, None), strict=True
    ):
      number = publisher.publish(params_of(patterns))
      published[number] = patterns
      if answer:
        answers.append(answer)
        assert reader.latest().version == number - 1
        assert str(number) in reader.refused[0]
      assert reader.latest().version == number
      assert reader.refused == []
      check_is_published(reader.latest(), published)
    server.shutdown()
  assert reader.latest().version == 4
  assert "Cannot connect" in reader.refused[0]


def test_folders_and_files_with_names_of_all_kinds(tmp_path):
  """Names that fsspec would read as a chain or a pattern, and files of others, which stay."""
  (one, two) = versions(2)
  for name in ("run::1", "run::2", "a [1]*?", "~", "memory:", "http"):
    publisher = js.weights.Publisher(tmp_path / name, LIKE)
    publisher.publish(params_of(one))
    for other in ("notes.aside", ".1.aside", "folder.aside"):
      (inside(tmp_path / name) / other).mkdir()
    js.weights.Publisher(str(tmp_path / name), LIKE).publish(params_of(two))
    reader = js.weights.Subscriber(tmp_path / name, LIKE)
    check_is_published(reader.latest(), {2: two})
    assert len(list(inside(tmp_path / name).iterdir())) == 5
  assert len(list(tmp_path.iterdir())) == 6
  address = "memory://run[1]*?"
  js.weights.Publisher(address, LIKE).publish(params_of(one))
  check_is_published(js.weights.Subscriber(address, LIKE).latest(), {1: one})
  with pytest.raises(ValueError, match="http://a can only be read: choose a folder"):
    js.weights.Publisher("http://a", LIKE)


def test_a_folder_without_versions(tmp_path):
  js.weights.Publisher(tmp_path, LIKE)._folder.makedirs("")
  with pytest.raises(LookupError, match="no version is there"):
    js.weights.Subscriber(tmp_path, LIKE).latest()
  with pytest.raises(LookupError, match="No such file"):
    js.weights.Subscriber(tmp_path / "none", LIKE).latest()


def rewrite(folder, name, processes):
  """A file as so many processes write it: each one with all of the entries."""
  header, arrays = files.read(opened(folder), name)
  (folder / str(name)).unlink()
  for process in range(processes):
    part = name._replace(process=process, processes=processes)
    files.write(opened(folder), part, header, arrays)


def test_a_version_without_a_part_is_none(tmp_path):
  """Of two processes, whose files have other names."""
  publish(tmp_path, 2)
  own = inside(tmp_path)
  for name in names_in(own):
    rewrite(own, name, processes=2)
  reader = js.weights.Subscriber(tmp_path, LIKE)
  (own / str(names_in(own)[-1])).unlink()
  assert reader.latest().version == 1
  assert reader.refused == []
  for name in names_in(own):
    if name.process == 0:
      (own / str(name)).unlink()
  with pytest.raises(LookupError, match="no version is there"):
    js.weights.Subscriber(tmp_path, LIKE).latest()


def test_a_trainer_that_begins_again_with_other_processes(tmp_path):
  """Of two processes, then of one, then of two: their readers go on."""
  reader = js.weights.Subscriber(tmp_path, LIKE)
  for version, processes in enumerate((2, 1, 2), 1):
    publish(tmp_path, 1)
    own = inside(tmp_path)
    (name,) = [name for name in names_in(own) if name.version == version]
    rewrite(own, name, processes)
    assert reader.latest().version == version
    assert reader.refused == []


class Killed(BaseException):
  """In place of SIGKILL."""


class Failing:
  """Calls of the system by a publisher or a reader: one of them fails, and if it kills, all behind it."""

  def __init__(self, monkeypatch, fails_at, error):
    self.count = 0
    self.fails_at, self.error = fails_at, error
    # bound before: the module os is one for all
    for name in ("fsync", "replace"):
      monkeypatch.setattr(os, name, self._wrap(getattr(os, name)))
    monkeypatch.setattr(files, "open", self._open, raising=False)
    for name in ("ls", "rm_file", "cat_file"):
      method = self._wrap(getattr(DirFileSystem, name))
      monkeypatch.setattr(DirFileSystem, name, method)

  def _call(self):
    self.count += 1
    is_dead = isinstance(self.error, Killed) and self.count > self.fails_at
    if self.count == self.fails_at or is_dead:
      raise self.error

  def _wrap(self, function):
    def call(*arguments, **options):
      self._call()
      return function(*arguments, **options)

    return call

  def _open(self, path, mode):
    self._call()
    return Half(path, mode, self._call)


class Half(io.FileIO):
  """A file: a write that fails leaves half of the bytes."""

  def __init__(self, path, mode, call):
    super().__init__(path, mode)
    self.call = call

  def write(self, part):
    content = bytes(part)
    super().write(content[: len(content) // 2])
    self.call()
    super().write(content[len(content) // 2 :])


@pytest.mark.parametrize("error", [Killed(), OSError(errno.ENOSPC, "No space left")])
@pytest.mark.parametrize("is_anchor", [False, True])
def test_a_publisher_that_is_killed_or_fails_at_any_step(error, is_anchor, tmp_path):
  """Of a version with a link, or with an anchor, too: readers go on, and so does the next publisher."""
  patterns = list(versions(30, changes=4000))
  due = find_anchor(tmp_path / "find", patterns) - (0 if is_anchor else 5)
  step = 0
  while True:
    step += 1
    folder = tmp_path / str(step)
    publisher = js.weights.Publisher(folder, LIKE)
    early, late = (js.weights.Subscriber(folder, LIKE) for _ in range(2))
    published = {}
    for one in patterns[: due - 1]:
      published[publisher.publish(params_of(one))] = one
    early.latest()
    published[due] = patterns[due - 1]
    with pytest.MonkeyPatch.context() as monkeypatch:
      calls = Failing(monkeypatch, step, error)
      with contextlib.suppress(Killed, OSError):
        publisher.publish(params_of(patterns[due - 1]))
        break
    for reader in (early, late):
      assert reader.latest().version in (due - 1, due)
      check_is_published(reader.latest(), published)
      # No part of a file has the name of one.
      assert reader.refused == []
    if isinstance(error, Killed):
      publisher = js.weights.Publisher(folder, LIKE)
    for one in patterns[due : due + 3]:
      number = publisher.publish(params_of(one))
      published[number] = one
      for reader in (early, js.weights.Subscriber(folder, LIKE)):
        assert reader.latest().version == number
        check_is_published(reader.latest(), published)
  # listing, and open, writes, fsync and replace of one or two files
  assert calls.count >= (14 if is_anchor else 7)


def publish_behind_readers(folder, readers):
  """8 versions, of which so many readers have read the third one: (publisher, published, readers)."""
  publisher = js.weights.Publisher(folder, LIKE)
  early = [js.weights.Subscriber(folder, LIKE) for _ in range(readers)]
  published = {}
  for one in versions(8):
    number = publisher.publish(params_of(one))
    published[number] = one
    if number == 3:
      for reader in early:
        reader.latest()
  return publisher, published, early


@pytest.mark.parametrize("error", [Killed(), OSError(errno.EIO, "Input/output error")])
@pytest.mark.parametrize("is_new", [False, True])
def test_a_reader_that_is_killed_or_fails_at_any_step(error, is_new, tmp_path):
  """One that was killed is started again; one that fails has a published version or none, and goes on."""
  _, published, early = publish_behind_readers(tmp_path, 0 if is_new else 7)
  for step in itertools.count(1):
    reader = js.weights.Subscriber(tmp_path, LIKE) if is_new else early.pop()
    with pytest.MonkeyPatch.context() as monkeypatch:
      calls = Failing(monkeypatch, step, error)
      try:
        check_is_published(reader.latest(), published)
      except Killed:
        reader = js.weights.Subscriber(tmp_path, LIKE)
      except LookupError:
        assert is_new
    assert reader.latest().version == 8
    check_is_published(reader.latest(), published)
    if calls.count < step:
      break
  # the list; the anchor and 7 links, or 5 links
  assert calls.count == (9 if is_new else 6)


class Pruning:
  """Reads of files; before one of them a publisher removes all files that were there."""

  def __init__(self, publisher, published, step):
    self.publisher, self.published, self.step = publisher, published, step
    self.reads = 0
    self.read = files.read

  def __call__(self, *arguments):
    self.reads += 1
    if self.reads == self.step:
      # Large changes are anchors: the third one removes all before the first one.
      for seed in range(1, 4):
        (one,) = versions(1, seed)
        self.published[self.publisher.publish(params_of(one))] = one
    return self.read(*arguments)


@pytest.mark.parametrize("is_new", [False, True])
def test_a_prune_between_the_list_of_a_reader_and_its_reads(is_new, tmp_path):
  """Before any of them: what is gone is refused, and what was read until then is a version."""
  for step in itertools.count(1):
    folder = tmp_path / str(step)
    publisher, published, early = publish_behind_readers(folder, 1)
    reader = js.weights.Subscriber(folder, LIKE) if is_new else early[0]
    pruning = Pruning(publisher, published, step)
    with pytest.MonkeyPatch.context() as monkeypatch:
      monkeypatch.setattr(files, "read", pruning)
      try:
        check_is_published(reader.latest(), published)
      except LookupError:
        assert is_new
        assert step == 1
    if pruning.reads < step:
      break
    assert names_in(inside(folder))[0].version == 9
    assert any("No such file" in reason for reason in reader.refused)
    assert reader.latest().version == 11
    check_is_published(reader.latest(), published)
  assert pruning.reads == (8 if is_new else 5)


def find_anchor(folder, patterns):
  """The number of the second anchor, which is written beside a link."""
  publisher = js.weights.Publisher(folder, LIKE)
  for one in patterns:
    number = publisher.publish(params_of(one))
    if len(names_of(folder, "anchor")) > 1:
      return number
  raise AssertionError("no second anchor")


PROGRAM = """
import sys
import numpy as np
import jaxsparse as js

weights = np.zeros(200_000, np.float32)
publisher = js.weights.Publisher(sys.argv[1], weights, None)
random = np.random.default_rng()
while True:
  number = publisher.version + 1
  weights[random.integers(0, len(weights), 400)] += 1
  weights[0] = number
  weights[-1] = weights[:-1].astype(np.float64).sum() % 997
  publisher.publish(weights)
  print(number, flush=True)
"""


def test_sigkill(tmp_path):
  """Whenever it comes: what is read has the number and the sum that its writer gave it."""
  like = np.zeros(200_000, np.float32)
  reader = js.weights.Subscriber(tmp_path, like, None)
  seen = 0
  for lines in (3, 6, 4):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
      for _ in range(lines):
        number = int(process.stdout.readline())
    finally:
      process.send_signal(signal.SIGKILL)
      process.wait()
      process.stdout.close()
    for one in (reader, js.weights.Subscriber(tmp_path, like, None)):
      version, weights = one.latest()
      weights = np.asarray(weights)
      assert number <= version == weights[0]
      assert version > seen
      assert weights[-1] == weights[:-1].astype(np.float64).sum() % 997
    seen = version


PROCESSES = """
import pathlib
import sys
import jax
import numpy as np
from jaxsparse.launch import rank
rank.join()
import jaxsparse as js
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxsparse.weights import files

folder = pathlib.Path(sys.argv[1])
mesh = jax.make_mesh((jax.device_count(),), ("x",))
put = lambda x, spec: jax.make_array_from_callback(
  x.shape, NamedSharding(mesh, spec), lambda index: x[index])
weights = np.arange(3000, dtype=np.float32)
local = np.full(7, 5, np.int32)
tree = lambda: {"rows": put(weights, P("x")), "all": put(weights, P()), "local": local}
def fail(*arguments):
  raise OSError("it fails")
publisher = js.weights.Publisher(folder, tree(), None)
names, write = files.names, files.write
for step in range(5):
  weights[step * 7 :: 500] += 1
  # One process cannot list the folder, and then not write to it.
  files.names, files.write = names, write
  if jax.process_index() == 1:
    files.names, files.write = {1: (fail, write), 2: (names, fail)}.get(step, (names, write))
  try:
    version = publisher.publish(tree())
  except OSError:
    # Without a list no process writes.
    assert step == 1 or (step == 2 and jax.process_index() == 1)
  else:
    assert step != 1
like = {"rows": weights, "all": weights, "local": local}
reader = js.weights.Subscriber(folder, like, None)
latest, got = reader.latest()
assert version == 5
if latest == 5:  # else the other process has not written it yet
  np.testing.assert_array_equal(got["rows"], weights)
  np.testing.assert_array_equal(got["all"], weights)
  np.testing.assert_array_equal(got["local"], local)
"""


@pytest.mark.long
def test_processes_write_their_shards(tmp_path):
  program = tmp_path / "program.py"
  program.write_text(PROCESSES)
  folder = tmp_path / "folder"
  folder.mkdir()
  command = [sys.executable, str(program), str(folder)]
  launch.run(command, 2, "processes", start_timeout=120, limit=240)
  weights = np.arange(3000, dtype=np.float32)
  for step in range(5):
    weights[step * 7 :: 500] += 1
  like = {"rows": weights, "all": weights, "local": np.zeros(7, np.int32)}
  reader = js.weights.Subscriber(folder, like, None)
  version, got = reader.latest()
  assert version == 5
  np.testing.assert_array_equal(got["rows"], weights)
  np.testing.assert_array_equal(got["all"], weights)
  anchors = names_of(folder, "anchor")
  assert {(name.process, name.processes) for name in anchors} == {(0, 2), (1, 2)}
  # After a failure all write an anchor.
  assert {name.process for name in anchors if name.version == 4} == {0, 1}
  assert all(name.version != 2 for name in names_in(inside(folder)))
  # A part that is not there makes no version.
  for name in names_in(inside(folder)):
    if name.version == 5 and name.process == 1:
      (inside(folder) / str(name)).unlink()
  assert js.weights.Subscriber(folder, like, None).latest().version == 4


class Chain(stateful.RuleBasedStateMachine):
  """Any interleaving: each reader has a version that was published, bit for bit, and none goes back without a cause."""

  folder = None
  is_damaged = False

  @stateful.initialize(seed=st.integers(0, 99))
  def begin(self, seed):
    self.temporary = tempfile.TemporaryDirectory()
    self.folder = pathlib.Path(self.temporary.name)
    self.patterns = versions(10_000, seed, changes=4000)
    self.publisher = js.weights.Publisher(self.folder, LIKE)
    self.former = None
    self.readers = [js.weights.Subscriber(self.folder, LIKE) for _ in range(3)]
    self.published = {}

  @stateful.rule(count=st.integers(1, 6))
  def publish(self, count):
    for _ in range(count):
      one = next(self.patterns)
      number = self.publisher.publish(params_of(one))
      self.published.setdefault(number, []).append(one)
    if not self.is_damaged:
      newcomer = js.weights.Subscriber(self.folder, LIKE)
      assert newcomer.latest().version == number
      self.check(newcomer.latest())

  def check(self, latest):
    """A number may be given twice, if the folder lost the first version."""
    patterns = patterns_of(latest.params)
    assert any((patterns == one).all() for one in self.published[latest.version])

  @stateful.rule(step=st.integers(1, 25), kills=st.booleans())
  def fail(self, step, kills):
    one = next(self.patterns)
    error = Killed() if kills else OSError(errno.ENOSPC, "No space left")
    with pytest.MonkeyPatch.context() as monkeypatch:
      Failing(monkeypatch, step, error)
      with contextlib.suppress(Killed, OSError):
        self.publisher.publish(params_of(one))
    # It may be there or not.
    self.published.setdefault(self.publisher.version, []).append(one)
    if kills:
      self.publisher = js.weights.Publisher(self.folder, LIKE)

  @stateful.rule()
  def replace(self):
    """A trainer is started again, and the former one may go on for a while."""
    if self.publisher._run:
      self.former = self.publisher
      self.publisher = js.weights.Publisher(self.folder, LIKE)

  @stateful.rule()
  def publish_as_the_former(self):
    """Until a later publisher has written something, and all of it is there."""
    if self.former is None:
      return
    names = files.names(self.former._folder)
    one = next(self.patterns)
    if any(name.run > self.former._run for name in names):
      with pytest.raises(ValueError, match="another publisher"):
        self.former.publish(params_of(one))
    else:
      number = self.former.publish(params_of(one))
      self.published.setdefault(number, []).append(one)

  @stateful.rule(index=st.integers(0, 2))
  def read(self, index):
    before = self.readers[index]._published
    try:
      latest = self.readers[index].latest()
    except LookupError:
      assert before is None
      return
    self.check(latest)

  @stateful.rule(index=st.integers(0, 2), step=st.integers(1, 8), kills=st.booleans())
  def fail_to_read(self, index, step, kills):
    """A reader that is killed is started again."""
    error = Killed() if kills else OSError(errno.EIO, "Input/output error")
    with pytest.MonkeyPatch.context() as monkeypatch:
      Failing(monkeypatch, step, error)
      try:
        self.read(index)
      except Killed:
        self.readers[index] = js.weights.Subscriber(self.folder, LIKE)

  @stateful.rule(
    draw=st.integers(0, 2**32), how=st.sampled_from(["flip", "cut", "gone"])
  )
  def damage(self, draw, how):
    there = sorted(self.folder.glob("*/*"))
    if not there:
      return
    path = there[draw % len(there)]
    self.is_damaged = True
    content = bytearray(path.read_bytes())
    if how == "gone" or not content:
      path.unlink()
    elif how == "cut":
      path.write_bytes(content[: draw % len(content)])
    else:
      content[draw % len(content)] ^= 1 << draw % 7
      path.write_bytes(content)

  def teardown(self):
    if self.folder:
      self.temporary.cleanup()


TestChain = Chain.TestCase
TestChain.settings = hypothesis.settings(stateful_step_count=25, deadline=None)

"""What the benchmarks refuse before they measure anything: the message names the flag, its value and the choices."""

import pytest

from tests.benchmarks import commands

REFUSED = {
  "collectives": [
    (["--workers=0"], "flag --workers=0: "),
    (["--rate=1gbit", "--engine=sim"], "--rate needs ranks that talk over a network"),
    (["--pin", "--workers=1000"], "--pin takes a core for each rank: --workers=1000, but there are"),
    (["--algorithms=spardl:teams=4"], "teams=4"),
  ],
  "elastic": [
    (["--batch_size=100"], "--batch_size=100, choose a multiple of 6, 5, 7"),
    (["--kill_at=400"], "--kill_at=400, --join_at=400, --steps=600: choose them in this order"),
  ],
  "hierarchy": [(["--way=sparse"], "choose from dense, flat, between"), (["--hosts=1"], "flag --hosts=1: ")],
  "netlab": [
    (["--hosts=251", "--", "true"], "error: --hosts=251, choose from 1 to 250"),
    (["--rate=10m", "--", "true"], "error: --rate='10m', choose from 1kbit to 100gbit, for example 10mbit"),
    (["--rate=1gbit\n", "--", "true"], "--rate='1gbit\\n'"),
    (["--hosts=2"], "error: COMMAND is missing, for example"),
  ],
  "race": [
    (["--seed="], "flag --seed=: give at least one number"),
    (["--seed=0", "--seed=-1"], "flag --seed=-1: "),
    (["--parts=curves,none"], "--parts=none, choose from curves, paces, wholes, advice, or none alone"),
    (["--clip=nan"], "--clip=nan: choose at least 0"),
    (["--target=0"], "--target=0.0: choose more than 0"),
    (["--warm_up=301"], "--warm_up=301, choose at most --steps=300"),
    (["--steps=20", "--most=10"], "--most=10, choose at least --steps=20"),
    (["--preset=spardl-fig6c", "--task=lm"], "--task=lm: --preset=spardl-fig6c trains resnet20"),
    (["--parts=curves", f"--report_dir={__file__}"], __file__),
    (["--parts=none", "--results=/tmp"], "/tmp"),
    (["--parts=none"], "No such file or directory"),
    (["--task=fnn3", "--parts=curves", "--data_dir=/nowhere"], "/nowhere has no data_batch_1"),
  ],
  "scale": [
    (["--workers=8,1"], "flag --workers=8,1: "),
    (["--network=mine:alpha=1e-5"], "error: --network=mine:alpha=1e-5, choose from 1GbE, 25GbE, 400Gb, or write name:"),
  ],
  "selection": [
    (["--density=1.5"], "--density=1.5: choose a share above 0, up to 1"),
    (["--inputs=uniform"], "choose from normal, student-t, heavy-tail, gradients, sorted"),
  ],
  "train": [
    (["--algorithm=sparse"], "unknown collective 'sparse', choose one of a2sgd, chunktopk, dcttopk, dense"),
    (["--batch_size=1000"], "does not fit in 1437 training images"),
    (["--task=lm", "--folds=5"], "--folds=5 is for the digits: other data come with a test set of their own"),
    (["--task=lm", "--model=mlp"], "--model is for --task=images"),
    (["--trace=loss"], "choose from words_sent"),
    (["extra"], "unexpected arguments ['extra']"),
  ],
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, subtests, tmp_path):
  folder = [] if name in ("hierarchy", "netlab", "scale", "selection") else [f"--report_dir={tmp_path / 'none'}"]
  rows = [(folder + flags, message) for flags, message in REFUSED[name]]
  commands.check_refusals(f"benchmarks.{name}", rows, subtests)
  assert not (tmp_path / "none").exists()

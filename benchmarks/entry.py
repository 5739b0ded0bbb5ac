"""Parses flags and runs a benchmark's `main`; expected errors become one line and exit status 1."""

import subprocess
from collections.abc import Callable

import jax
from absl import app, logging

from jaxsparse import launch

_OF_THE_PROGRAM = (jax.errors.JaxRuntimeError, NotImplementedError, RecursionError)  # errors that need their traceback


def run(main: Callable[[], None]) -> None:
  """Runs the `main` of a benchmark that takes nothing but flags."""

  def checked(argv: list[str]) -> None:
    if len(argv) > 1:
      raise app.UsageError(f"unexpected arguments {argv[1:]}: options are --name=value")
    logging.set_verbosity(logging.WARNING)  # JAX tells at INFO which backends it does not find
    try:
      main()
    except _OF_THE_PROGRAM:
      raise
    except (ValueError, OSError, RuntimeError, subprocess.TimeoutExpired) as error:
      launch.fail(error)

  app.run(checked)

"""Parses flags and runs a benchmark's `main`; expected errors become one line and exit status 1."""

import subprocess
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from absl import app, flags, logging

from jaxsparse import launch

# errors that need their traceback
_OF_THE_PROGRAM = (
  jax.errors.JaxRuntimeError,
  NotImplementedError,
  RecursionError,
)

# what is defined here is a flag of the benchmark that asks for it
flags.disclaim_key_flags()


class _Numbers(flags.ListParser):
  """Parses at least one number, separated by commas, each of which the parser `one` accepts."""

  def __init__(self, one: Any):
    super().__init__()
    self._one = one

  def parse(self, argument: Any) -> Any:
    """The numbers, each once."""
    numbers = list(
      dict.fromkeys(self._one.parse(text) for text in super().parse(argument))
    )
    if not numbers:
      raise ValueError("give at least one number")
    return numbers


class _Repeated(flags.Flag):
  """A flag whose lists are joined where it is given several times."""

  def parse(self, argument: Any) -> None:
    """Adds what is given once more."""
    # `present` counts how often the flag was given; before the first time, `value` is
    # the default, which is replaced.
    before = (self.value or []) if self.present else []
    super().parse(argument)
    self.value = list(dict.fromkeys([*before, *(self.value or [])]))


def define_seeds(default: Sequence[int]) -> flags.FlagHolder[Any]:
  """The flag --seed."""
  text = "Seeds of the parameters and of the batches, separated by commas."
  parser, serializer = (
    _Numbers(flags.IntegerParser(0, 2**32 - 1)),
    flags.ListSerializer[Any](","),
  )
  return flags.DEFINE_flag(_Repeated(parser, serializer, "seed", list(default), text))


def define_numbers(
  name: str, default: Sequence[float], text: str, one: Any = None
) -> flags.FlagHolder[Any]:
  """A flag that holds numbers separated by commas: whole ones above 0, or those that the parser `one` accepts."""
  parser = _Numbers(one or flags.IntegerParser(lower_bound=1))
  return flags.DEFINE(
    parser, name, list(default), text, serializer=flags.ListSerializer(",")
  )


def require(
  flag: flags.FlagHolder[Any], holds: Callable[[Any], bool], choices: str
) -> None:
  """Refuses values of a flag for which `holds` is false; None is for no value."""
  flags.register_validator(
    flag, lambda value: value is None or holds(value), f"choose {choices}"
  )


def require_choices(
  flag: flags.FlagHolder[Any], choices: Sequence[str], empty: bool = True
) -> None:
  """Refuses a list with other values than these, and an empty one unless `empty`."""
  holds = lambda values: set(values) <= set(choices) and (empty or bool(values))
  require(flag, holds, f"from {', '.join(dict.fromkeys(choices))}")


def define_grace() -> flags.FlagHolder[str]:
  """The flag --grace; `read_grace` gives its value."""
  flag = flags.DEFINE_string(
    "grace", "auto", "Seconds that K workers wait for others, or auto."
  )
  is_seconds = lambda text: text.replace(".", "", 1).isdecimal()
  require(
    flag, lambda text: text == "auto" or is_seconds(text), "auto, or 0 seconds or more"
  )
  return flag


def read_grace(flag: flags.FlagHolder[str]) -> float | Literal["auto"]:
  """What `js.partial.Quorum` takes as `grace`."""
  return "auto" if flag.value == "auto" else float(flag.value)


def define_report_dir(files: str) -> flags.FlagHolder[str]:
  """The flag --report_dir."""
  return flags.DEFINE_string("report_dir", "out", f"Folder for {files}.")


def define_cache_dir() -> flags.FlagHolder[str]:
  """The flag --cache_dir."""
  return flags.DEFINE_string(
    "cache_dir", "out/cache", "Folder for recorded gradients and compiled programs."
  )


def define_json() -> flags.FlagHolder[bool]:
  """The flag --json."""
  return flags.DEFINE_bool(
    "json",
    False,
    "Print the result as JSON on standard output, all else on standard error.",
  )


def run(main: Callable[[], None]) -> None:
  """Runs the `main` of a benchmark that takes nothing but flags."""

  def checked(argv: list[str]) -> None:
    if len(argv) > 1:
      # The first argument is the name of the program.
      raise app.UsageError(f"unexpected arguments {argv[1:]}: options are --name=value")
    # JAX tells at INFO which backends it does not find
    logging.set_verbosity(logging.WARNING)
    try:
      main()
    except _OF_THE_PROGRAM:
      raise
    except (ValueError, OSError, RuntimeError, subprocess.TimeoutExpired) as error:
      launch.fail(error)

  app.run(checked)

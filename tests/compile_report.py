"""`pytest --compile-report`: processor seconds of each test, and how long JAX traces, lowers and compiles in it."""

import collections
import os

import jax
import pytest

_PREFIX = "/jax/core/compile/"
_STAGES = {
  "jaxpr_trace_duration": "trace",
  "jaxpr_to_mlir_module_duration": "lower",
  "backend_compile_duration": "compile",
}
_PROPERTY = "compile_report"
_MOST = 40  # tests that are printed

_spent: collections.Counter[str] = collections.Counter()


def _listen(event: str, seconds: float, **_: object) -> None:
  stage = _STAGES.get(event.removeprefix(_PREFIX))
  if stage is not None:
    _spent[stage] += seconds
    _spent["programs"] += stage == "compile"


def _cpu() -> float:
  """Processor seconds of this process and of the children it waited for."""
  return sum(os.times()[:4])


def pytest_addoption(parser):
  parser.addoption("--compile-report", action="store_true", help="print CPU and compile seconds by file and test")


def pytest_configure(config):
  if config.getoption("--compile-report"):
    jax.monitoring.register_event_duration_secs_listener(_listen)
    config.pluginmanager.register(_Report(), "compile-report")


class _Report:
  """Measures in the process that runs a test, prints in the one that reports: under xdist they differ."""

  @pytest.hookimpl(wrapper=True)
  def pytest_runtest_protocol(self, item):
    _spent.clear()
    item.stash[_STARTED] = _cpu()
    return (yield)

  @pytest.hookimpl(tryfirst=True)
  def pytest_runtest_makereport(self, item, call):
    if call.when == "teardown":
      spent = {stage: round(seconds, 3) for stage, seconds in _spent.items()}
      item.user_properties.append((_PROPERTY, {"cpu": round(_cpu() - item.stash[_STARTED], 3)} | spent))

  def pytest_terminal_summary(self, terminalreporter):
    tests, files = {}, collections.defaultdict(collections.Counter)
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
      spent = dict(getattr(report, "user_properties", ())).get(_PROPERTY)
      if spent is not None:
        tests[report.nodeid] = spent
    for nodeid, spent in tests.items():
      files[nodeid.partition("::")[0]].update(collections.Counter(spent) + collections.Counter(tests=1))
    for title, rows in (("files", files), ("tests", tests)):
      terminalreporter.section(f"CPU and compile seconds by {title}")
      _print(terminalreporter, rows, _MOST if title == "tests" else len(rows))
    total = sum(files.values(), collections.Counter())
    _print(terminalreporter, {"total": total}, 1)


_STARTED = pytest.StashKey[float]()


def _print(terminal, rows, most):
  columns = ("cpu", *_STAGES.values(), "programs", "tests")
  terminal.write_line("".join(f"{column:>9}" for column in columns))
  for name, spent in sorted(rows.items(), key=lambda row: -row[1]["cpu"])[:most]:
    cells = (spent.get(column, 1 if column == "tests" else 0) for column in columns)
    line = "".join(f"{cell:9.1f}" if isinstance(cell, float) else f"{cell:9d}" for cell in cells)
    terminal.write_line(f"{line}  {name}")

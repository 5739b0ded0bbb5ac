"""`pytest --compile-report`: processor seconds of each file and test, and how long JAX traces, lowers and compiles."""

import collections
import os

import jax
import pytest

_STAGES = {
  "jaxpr_trace_duration": "trace",
  "jaxpr_to_mlir_module_duration": "lower",
  "backend_compile_duration": "compile",
}
_COLUMNS = ("cpu", *_STAGES.values(), "programs")
_MOST = 40  # rows that are printed

_spent: collections.Counter[str] = collections.Counter()


def _listen(event: str, seconds: float, **_: object) -> None:
  if stage := _STAGES.get(event.removeprefix("/jax/core/compile/")):
    _spent[stage] += seconds
    _spent["programs"] += stage == "compile"


def pytest_addoption(parser):
  parser.addoption("--compile-report", action="store_true", help="print CPU and compile seconds by file and test")


def pytest_configure(config):
  if config.getoption("--compile-report"):
    jax.monitoring.register_event_duration_secs_listener(_listen)
    config.pluginmanager.register(_Report(), "compile-report")


class _Report:
  """Measures in the process that runs a test, prints in the one that reports: under xdist they differ."""

  @pytest.hookimpl(wrapper=True)
  def pytest_runtest_protocol(self):
    _spent.clear()
    _spent["cpu"] = -sum(os.times()[:4])  # of this process and of the children it waited for
    return (yield)

  @pytest.hookimpl(tryfirst=True)
  def pytest_runtest_makereport(self, item, call):
    if call.when == "teardown":
      _spent["cpu"] += sum(os.times()[:4])
      item.user_properties.append(("compile_report", dict(_spent)))

  def pytest_terminal_summary(self, terminalreporter):
    rows = collections.defaultdict(collections.Counter)
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
      if spent := dict(getattr(report, "user_properties", ())).get("compile_report"):
        for name in ("total", report.nodeid.partition("::")[0], report.nodeid):
          rows[name].update(spent)
    terminalreporter.section("CPU and compile seconds by file and test")
    terminalreporter.write_line("".join(f"{column:>9}" for column in _COLUMNS))
    for name, spent in sorted(rows.items(), key=lambda row: -row[1]["cpu"])[:_MOST]:
      terminalreporter.write_line("".join(f"{spent[column]:9.1f}" for column in _COLUMNS) + f"  {name}")

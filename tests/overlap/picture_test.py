"""The picture of a plan shows what the plan says."""

import sys

import pytest

import jaxsparse as js

LAYERS = [0.2, 0.1, 0.1], [2e5, 1e6, 2e6]


def plans(*kinds):
  return [js.overlap.plan(kind, *LAYERS, alpha=0.05, beta=1e-7, gamma=1.5) for kind in kinds]


def test_every_layer_and_every_communication_is_where_the_plan_says():
  wfbp, asc = plans("wfbp", "asc_wfbp")
  for plan, panel in zip((wfbp, asc), js.overlap.figure(wfbp, asc).axes, strict=True):
    bars = [(bar.get_x(), bar.get_x() + bar.get_width(), bar.get_y()) for bar in panel.patches]
    backward = [bar[:2] for bar in bars if bar[2] < 0]
    assert backward == [pytest.approx(span) for span in ((0, 100), (100, 200), (200, 400))]
    spans = [(start, end) for start, end, row in bars if row > 0]
    assert spans[::2] == [pytest.approx((1e3 * sent.start, 1e3 * sent.start + 50)) for sent in plan.timeline]
    assert spans[1::2] == [pytest.approx((1e3 * sent.start + 50, 1e3 * sent.end)) for sent in plan.timeline]
    assert f"{1e3 * plan.iteration_time:.4g} ms" in [text.get_text() for text in panel.texts]


def test_what_is_under_way_at_once_has_rows_of_its_own():
  (asc,) = plans("asc_wfbp")
  rows = [bar.get_y() for bar in js.overlap.figure(asc).axes[0].patches if bar.get_y() > 0][::2]
  pairs = list(zip(asc.timeline, rows, strict=True))
  beside = [(a, b) for number, a in enumerate(pairs) for b in pairs[:number] if b[0].end > a[0].start]
  assert beside
  assert all(a[1] != b[1] for a, b in beside)


def test_without_a_plan():
  with pytest.raises(ValueError, match="at least one plan"):
    js.overlap.figure()


def test_without_matplotlib(monkeypatch):
  monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
  with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
    js.overlap.figure(*plans("wfbp"))

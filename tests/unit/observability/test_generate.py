"""Committed dashboards and rules are those that the code generates."""

from __future__ import annotations

from pathlib import Path

import pytest

from observability import generate, pages
from observability.catalogue import exported


def test_everything_is_current() -> None:
    wanted = generate.files()
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    assert stale == [], "run `python -m observability.generate`"
    assert generate.strangers(wanted) == []


def test_check_finds_what_is_stale_or_left_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chart = tmp_path / "charts" / "temper"
    wanted = {chart / "rules" / "a.yaml": "a\n", chart / "dashboards" / "b.json": "{}\n"}
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate, "CHART", chart)
    monkeypatch.setattr(generate, "files", lambda: wanted)
    monkeypatch.setattr("sys.argv", ["generate"])
    assert generate.main() == 0
    monkeypatch.setattr("sys.argv", ["generate", "--check"])
    assert generate.main() == 0
    (chart / "rules" / "old.yaml").write_text("")
    (chart / "rules" / "a.yaml").write_text("b\n")
    assert generate.main() == 1
    said = capsys.readouterr().err
    assert "charts/temper/rules/a.yaml is not current" in said
    assert "charts/temper/rules/old.yaml is not current" in said
    monkeypatch.setattr("sys.argv", ["generate"])
    assert generate.main() == 0
    assert not (chart / "rules" / "old.yaml").exists()


def test_a_page_without_its_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the lines"):
        pages.with_tables("# Monitoring\n")


def test_every_metric_is_described_and_named_as_prometheus_asks() -> None:
    found = exported()
    assert len(found) > 90
    for metric in found:
        assert len(metric.text) > 5, metric.name
        assert metric.name.startswith(("temper_", "vllm:", "gen_ai_"))
        if metric.kind == "histogram":
            assert len(metric.bounds) > 5
            assert metric.name.endswith(("_seconds", "_tokens", "_token_usage", "_tokens_total"))

"""Dashboards: every query parses, asks for what the code exports, and every panel is complete and in its place."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from observability import layout
from observability.alerts import GROUPS
from observability.board import COLUMNS, Board, Panel, Place, Query, Row, arrange
from observability.boards import BOARDS
from observability.foreign import TARGET
from observability.promql import asked
from observability.render import render
from tests.promtool import Promtool

Labels = dict[str, frozenset[str]]
QUERIES = [
    (f"{board.name}: {panel.title}", query) for board in BOARDS for panel in board.panels for query in panel.queries
]
IDS = [f"{title}: {query.legend}" for title, query in QUERIES]
boards = pytest.mark.parametrize("board", BOARDS, ids=lambda board: str(board.name))


def test_every_query_parses(promtool: Promtool, tmp_path: Path) -> None:
    """Expressions as rules of one file, which promtool can check."""
    rules = [
        {"record": f"query:{number}", "expr": query.expr.replace("$__rate_interval", "5m")}
        for number, (_, query) in enumerate(QUERIES)
    ]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    result = promtool("check", "rules", file)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(rules)} rules found" in result.stdout
    rules[7]["expr"] += ")"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    assert promtool("check", "rules", file).returncode != 0, "promtool looks at each"


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=IDS)
def test_what_is_asked_for_exists(title: str, query: Query, ours: Labels, theirs: Labels) -> None:
    about = asked(query.expr)
    assert about.selectors, "a panel shows something"
    possible = set(TARGET)
    for selector in about.selectors:
        assert selector.name in ours or selector.name in theirs, f"nothing exports {selector.name}"
        labels = ours[selector.name] | TARGET if selector.name in ours else theirs[selector.name]
        assert selector.labels <= labels, f"{selector.name} has no label {set(selector.labels - labels)}"
        possible |= labels
    assert about.grouped <= possible
    shown = set(re.findall(r"{{(\w+)}}", query.legend))
    assert shown <= possible
    assert shown <= about.grouped or " by (" not in query.expr, "a label that was summed away is shown"


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=IDS)
def test_the_variables_choose_what_is_shown(title: str, query: Query, ours: Labels) -> None:
    for selector in asked(query.expr).selectors:
        matched = {label for label, _, value in selector.matchers if value == f"${label}"}
        assert {"namespace", "release"} <= matched if selector.name in ours else "namespace" in matched


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=IDS)
def test_quantiles_are_of_histograms_and_exemplars_of_latencies(title: str, query: Query) -> None:
    selectors = asked(query.expr).selectors
    if "histogram_quantile" in query.expr:
        assert all(selector.name.endswith("_bucket") for selector in selectors)
        assert "le" in asked(query.expr).grouped
    if query.exemplars:
        assert "histogram_quantile" in query.expr


@boards
def test_panels_fill_the_grid_without_overlap(board: Board) -> None:
    taken: set[tuple[int, int]] = set()
    for _, place in arrange(board):
        cells = {(x, y) for x in range(place.x, place.x + place.width) for y in range(place.y, place.y + place.height)}
        assert not cells & taken
        assert place.x + place.width <= COLUMNS
        taken |= cells


@boards
def test_the_json_is_what_grafana_knows(board: Board) -> None:
    """Grafana's own types read the file and lose nothing."""
    text = render(board)
    again = Dashboard.from_json(json.loads(text))
    assert json.loads(json.dumps(again, cls=JSONEncoder)) == json.loads(text)
    names = [variable["name"] for variable in json.loads(text)["templating"]["list"]]
    assert names == ["datasource", "namespace", "release", "pod"]


@boards
def test_every_panel_of_the_json_is_described_and_links_runbooks_that_exist(board: Board) -> None:
    panels = [panel for panel in json.loads(render(board))["panels"] if panel["type"] != "row"]
    assert len(panels) == len(board.panels)
    known = {f"RUNBOOKS_URL/{alert.name}.md" for group in GROUPS for alert in group.alerts}
    for panel in panels:
        assert len(panel["description"]) > 5
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert {link["url"] for link in panel.get("links", ())} <= known


def test_every_alert_is_at_a_panel() -> None:
    shown = {name for board in BOARDS for panel in board.panels for name in panel.alerts}
    assert shown == {alert.name for group in GROUPS for alert in group.alerts}


def test_a_panel_that_is_not_complete_is_refused() -> None:
    query = (Query("up"),)
    for wrong in (
        {"title": "", "description": "d", "queries": query},
        {"title": "t", "description": "", "queries": query},
        {"title": "t", "description": "d", "queries": ()},
        {"title": "t", "description": "d", "queries": query, "width": 25},
        {"title": "t", "description": "d", "queries": query, "steps": ((2, "red"), (1, "green"))},
    ):
        with pytest.raises(ValueError):
            Panel(**wrong)  # type: ignore[arg-type]
    panel = Panel("t", "d", query)
    with pytest.raises(ValueError, match="same title"):
        Board("b", "B", "d", (Row("r", (panel, panel)),))


def test_a_full_line_is_wrapped() -> None:
    panels = tuple(Panel(name, "d", (Query("up"),), kind="number", width=10) for name in "abc")
    places = [place for _, place in arrange(Board("b", "B", "d", (Row("r", panels),)))]
    assert places == [Place(0, 0, 24, 1), Place(0, 1, 10, 4), Place(10, 1, 10, 4), Place(0, 5, 10, 4)]


def test_a_picture_of_the_layout(tmp_path: Path) -> None:
    picture = layout.draw(BOARDS[2], tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")

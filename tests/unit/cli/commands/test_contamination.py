"""`temper eval contamination`: what people are told."""

from __future__ import annotations

from tests.unit.cli.runner import routes, temper
from tests.unit.cli.server import Reply, serving


def test_contaminated_items_and_unknown_versions_are_told() -> None:
    found = {
        "suite": "sums@1",
        "adapter": "bot@2",
        "items": 200,
        "contaminated": 2,
        "exact": 1,
        "jobs": 3,
        "unknown": ["up@1"],
        "data": [
            {"index": 4, "id": "five", "exact": True, "share": 0.0},
            {"index": 9, "id": "ten", "exact": False, "share": 0.25},
        ],
    }
    with serving(routes(GET_v1_eval_suites_sums_contamination=Reply(found))) as (url, requests):
        result = temper("eval", "contamination", "sums", "bot@2", url=url)
    assert result.exit_code == 0, result.stderr
    assert "adapter=bot" in requests[0].path
    assert "2 of 200 items of sums@1 occur in the training data of bot@2" in result.stdout
    assert "five  whole prompt" in result.stdout
    assert "ten  25% of its text" in result.stdout
    assert "up@1" in result.stdout

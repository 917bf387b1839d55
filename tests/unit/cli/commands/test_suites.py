"""`temper eval suites`: what is sent, and what people are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from models.tiny.recipe.data import SKILLS
from services.common.evaluation.suites.lines import read_suite
from services.gateway.protocol.evaluation.suites import SuiteRequest
from tests.unit.cli.runner import routes, temper
from tests.unit.cli.server import Reply, Seen, serving

SUITE: dict[str, Any] = {
    "id": "sums@2",
    "items": 200,
    "clusters": 50,
    "digest": "d" * 64,
    "smallest_gain": 0.0781,
    "settings": {"scorer": {"type": "numeric"}, "sampling": {"max_tokens": 16}, "description": "little sums"},
}


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    file = tmp_path / "items.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}?", "completion": str(n)}) + "\n" for n in range(4)))
    return file


def test_a_suite_is_sent_with_its_settings(lines: Path, tmp_path: Path) -> None:
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({"scorer": {"tolerance": 0.1}, "description": "little sums"}))
    with serving(routes(POST_v1_eval_suites=Reply(SUITE, 201))) as (url, requests):
        result = temper(
            *("eval", "suites", "create", "sums", str(lines), "--scorer", "numeric", "--settings", str(settings)),
            *("--set", "sampling.max_tokens=16"),
            url=url,
        )
    assert result.exit_code == 0, result.stderr
    assert requests[0].json == {
        "name": "sums",
        "jsonl": lines.read_text(),
        "scorer": {"type": "numeric", "tolerance": 0.1},
        "sampling": {"max_tokens": 16},
        "description": "little sums",
    }
    assert "sums@2  200 items in 50 groups, scored by numeric, sees gains of 7.8 points" in result.stdout


def test_the_rows_that_are_left_for_training_are_written(lines: Path, tmp_path: Path) -> None:
    def page(seen: Seen) -> Reply:
        first = "after=-1" in seen.path
        return Reply({"data": [{"id": "line-2" if first else "line-4"}], "has_more": first})

    rest = tmp_path / "rest.jsonl"
    with serving(routes(POST_v1_eval_suites=Reply(SUITE, 201), GET_v1_eval_suites_sums2_items=page)) as (url, requests):
        result = temper(
            *("eval", "suites", "create", "sums", str(lines), "--scorer", "exact", "--fraction", "0.5", "--seed", "3"),
            *("--rest", str(rest)),
            url=url,
        )
    assert result.exit_code == 0, result.stderr
    assert requests[0].json["split"] == {"fraction": 0.5, "seed": 3}
    assert [json.loads(line)["prompt"] for line in rest.read_text().splitlines()] == ["0?", "2?"]
    assert "2 rows are left" in result.stdout


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "a suite needs a scorer"),
        (["--scorer", "exact", "--rest", "x"], "need --fraction"),
        (["--set", "scorer.type=regex", "--scorer", "exact"], "contradicts the scorer in the settings, regex"),
    ],
)
def test_contradictory_options_are_refused_before_anything_is_sent(lines: Path, options: list[str], told: str) -> None:
    result = temper("eval", "suites", "create", "sums", str(lines), *options, url="http://127.0.0.1:9")
    assert result.exit_code == 2
    assert told in result.stderr


def test_suites_are_listed_shown_paged_and_removed() -> None:
    item = {"index": 3, "id": "4", "prompt": "1 plus 1?", "expected": ["2", "two"], "group": None}
    answer = routes(
        GET_v1_eval_suites=Reply({"data": [SUITE], "has_more": False}),
        GET_v1_eval_suites_sums2=Reply(SUITE),
        GET_v1_eval_suites_sums_items=Reply({"data": [item], "has_more": False}),
        DELETE_v1_eval_suites_sums=Reply({"id": "sums", "deleted": True, "versions": [1, 2]}),
    )
    with serving(answer) as (url, requests):
        listed = temper("eval", "suites", "list", "sums", url=url)
        shown = temper("eval", "suites", "show", "sums@2", url=url)
        items = temper("eval", "suites", "items", "sums", "--after", "2", url=url)
        removed = temper("eval", "suites", "delete", "sums", "--json", url=url)
    assert "sums@2" in listed.stdout
    assert "numeric" in listed.stdout
    assert 'scorer  {"type": "numeric"}' in shown.stdout
    assert "1 plus 1?" in items.stdout
    assert "2 | two" in items.stdout
    assert json.loads(removed.stdout)["versions"] == [1, 2]
    assert [seen.path for seen in requests[:1] + requests[2:3]] == [
        "/v1/eval/suites?limit=100&name=sums",
        "/v1/eval/suites/sums/items?limit=20&after=2",
    ]


def test_the_suites_that_come_with_temper_are_made_in_one_step() -> None:
    def made(seen: Seen) -> Reply:
        body = seen.json
        assert isinstance(body, dict)
        return Reply({**SUITE, "id": f"{body['name']}@1", "items": len(body["jsonl"].splitlines())}, 201)

    with serving(routes(POST_v1_eval_suites=made)) as (url, requests):
        result = temper("eval", "suites", "create-shipped", "--prefix", "ours-", url=url)
    assert result.exit_code == 0, result.stderr
    sent = {seen.json["name"]: SuiteRequest.model_validate(seen.json) for seen in requests}
    assert set(sent) == {f"ours-{skill}" for skill in SKILLS}
    assert all(len(read_suite(body.jsonl, body.settings)) == 200 for body in sent.values())
    assert "ours-dates@1" in result.stdout


def test_a_published_set_brings_its_scorer(tmp_path: Path) -> None:
    file = tmp_path / "test.jsonl"
    file.write_text(json.dumps({"question": "How much?", "answer": "6\n#### 6"}) + "\n")
    with serving(routes(POST_v1_eval_suites=Reply(SUITE, 201))) as (url, requests):
        call = ("eval", "suites", "create", "gsm8k", str(file), "--format", "gsm8k", "--set", "sampling.max_tokens=99")
        result = temper(*call, url=url)
    assert result.exit_code == 0, result.stderr
    assert requests[0].json == {
        "name": "gsm8k",
        "description": "GSM8K",
        "scorer": {"type": "numeric"},
        "sampling": {"max_tokens": 99},
        "jsonl": '{"prompt": "How much?", "expected": "6"}\n',
    }


def test_a_set_of_no_known_form_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "test.jsonl"
    file.write_text("{}\n")
    result = temper("eval", "suites", "create", "x", str(file), "--format", "arc", url="http://127.0.0.1:9")
    assert (result.exit_code, "is none of mmlu" in result.stderr) == (2, True)

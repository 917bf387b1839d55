"""A sample of the hostile corpus against the gateway; `python -m benchmarks.gateway.hostile` sends 20,000 to a whole
Temper."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from itertools import islice

from benchmarks.gateway.hostile import LEAKS, SECRET, Report, own_corpus
from benchmarks.gateway.hostile_bodies import Hostile, hostile_bodies
from tests.unit.gateway.conftest import MODEL, Running


def test_hostile_bodies_are_refused_and_nothing_is_held(running: Running) -> None:
    report = Report()
    options = Namespace(bodies=200, seed=7, streams=8, patience=20.0)
    asyncio.run(own_corpus(running.url, MODEL, options, report))
    assert report.failures == []
    assert sum(report.statuses.values()) == 200
    assert report.statuses["400"] > 50, "most of them are wrong"
    running.wait_for(lambda: not running.engine.running)


def test_equal_seeds_make_equal_bodies_and_no_body_looks_like_a_leak() -> None:
    bodies = list(islice(hostile_bodies(3, model=MODEL), 200))
    assert bodies == list(islice(hostile_bodies(3, model=MODEL), 200))
    assert {hostile.made for hostile in bodies} == {"value", "bytes", "headers"}
    assert not any(LEAKS.search(hostile.body.decode("latin-1")) for hostile in bodies)


def test_the_report_knows_a_leak_from_an_error() -> None:
    sent = Hostile("/v1/completions", b"{}")
    whole = '{"error": {"message": "no"}}'
    for status, text, why in (
        (500, whole, "status 500"),
        (400, '{"error": {"message": "Traceback (most recent call last)"}}', "leaks 'Traceback'"),
        (401, f'{{"error": {{"message": "the key {SECRET} is unknown"}}}}', f"leaks {SECRET!r}"),
        (400, "oops", "not an error object"),
        (404, '{"detail": "Not Found"}', "not an error object"),
    ):
        report = Report()
        report.take(sent, status, text, 0.1)
        assert [failure["why"] for failure in report.failures] == [why]
    report = Report()
    report.take(sent, 400, whole, 0.1)
    report.take(sent, 200, "data: [DONE]", 0.1)
    assert report.failures == []

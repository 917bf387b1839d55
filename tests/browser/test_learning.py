"""The page of learners and canaries, by clicks."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Reader
from tests.stack import PATIENCE, Stack


@pytest.fixture
def adapter(stack: Stack) -> Iterator[str]:
    """An adapter with a current version and one that is only a candidate."""
    name = f"taught-{uuid.uuid4().hex[:8]}"
    for candidate in (False, True):
        example = {"prompt": "hello", "completion": "Good day!"}
        body = {"adapter": name, "attach": False, "examples": [example], **({"candidate": True} if candidate else {})}
        job = httpx.post(f"{stack.url}/v1/train/sft", json=body, timeout=PATIENCE).raise_for_status().json()
        with httpx.stream("GET", f"{stack.url}/v1/train/jobs/{job['id']}/events", timeout=120) as events:
            assert '"succeeded"' in [line for line in events.iter_lines() if line.startswith("data:")][-1]
    yield name
    httpx.delete(f"{stack.url}/v1/adapters/{name}", timeout=PATIENCE).raise_for_status()


@pytest.mark.thorough
def test_arms_of_a_canary_side_by_side_and_a_rollback(reader: Reader, stack: Stack, adapter: str) -> None:
    body = {"version": f"{adapter}@2", "policy": {"share": 0.5}}
    canary = httpx.post(f"{stack.url}/v1/canaries", json=body, timeout=PATIENCE).raise_for_status().json()
    said = {"model": adapter, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    number = tried = 0
    while tried < 16:  # every gateway knows of it within a second
        user = f"u{(number := number + 1)}"
        answer = httpx.post(f"{stack.url}/v1/chat/completions", json={**said, "user": user}, timeout=PATIENCE)
        opinion = {"completion_id": answer.raise_for_status().json()["id"], "thumb": "up", "user": user}
        httpx.post(f"{stack.url}/v1/feedback", json=opinion, timeout=PATIENCE).raise_for_status()
        tried += "x-temper-canary" in answer.headers
    page = reader.open("learning", "Learning")
    page.get_by_label("Canaries").get_by_role("row").filter(has_text=f"{adapter}@2").get_by_role("link").click()
    page.get_by_role("heading", level=1, name=f"Canary of {adapter}@2").wait_for()
    arms = page.get_by_label("Arms")

    expect(arms.get_by_role("columnheader")).to_have_text(
        ["Measure", f"Current: {adapter}@1", f"Candidate: {adapter}@2"], ignore_case=True, timeout=30_000
    )

    page.wait_for_function(
        "() => [...document.querySelectorAll('[aria-label=Arms] tbody tr')]"
        ".find((row) => row.cells[0].innerText === 'Answers')"
        ".innerText.match(/\\d+/g).reduce((sum, one) => sum + Number(one), 0) === 16"
    )
    reader.picture("dashboard-canary", after=2)
    reader.check()
    page.get_by_role("button", name="Roll back").click()
    reader.agree("Roll it back")
    expect(page.get_by_text("rolled back", exact=True)).to_be_visible()
    assert httpx.get(f"{stack.url}/v1/canaries/{canary['id']}", timeout=PATIENCE).json()["state"] == "rolled_back"


def test_a_learner_is_paused_resumed_and_asked(reader: Reader, stack: Stack, adapter: str) -> None:
    name = f"from-thumbs-{uuid.uuid4().hex[:6]}"
    policy = {"name": name, "adapter": adapter, "method": "kto", "attach": False, "trigger": {"min_rows": 1000}}
    httpx.post(f"{stack.url}/v1/learners", json=policy, timeout=PATIENCE).raise_for_status()
    page = reader.open("learning", "Learning")
    page.get_by_label("Learners").get_by_role("link", name=name).click()
    page.get_by_role("heading", level=1, name=name).wait_for()
    expect(page.get_by_role("heading", name="The next cycle")).to_be_visible()
    page.get_by_role("button", name="Pause", exact=True).click()
    reader.agree("Pause it")
    timeline = page.get_by_role("list", name="What happened")
    expect(timeline).to_contain_text("It is paused.")
    page.get_by_role("button", name="Resume").click()
    expect(timeline).to_contain_text("It goes on.")
    page.get_by_role("button", name="Begin a cycle now").click()
    expect(timeline).to_contain_text("Cycle 1 begins", timeout=30_000)
    expect(timeline).to_contain_text("failed", timeout=30_000)  # there is nothing to learn from: the log is off
    reader.check()
    reader.open("learning", "Learning")  # a page of a learner that is gone would say so
    httpx.delete(f"{stack.url}/v1/learners/{name}", timeout=PATIENCE).raise_for_status()

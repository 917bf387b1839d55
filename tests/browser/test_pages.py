"""Each page's main job, by clicks and keys."""

from __future__ import annotations

import json
import re
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
import redis
from playwright.sync_api import Browser, Route, expect

from tests.browser.conftest import Reader
from tests.stack import PATIENCE, Stack

PAGES = {
    "overview": "Overview",
    "chat": "Chat",
    "jobs": "Jobs",
    "jobs/new": "New job",
    "adapters": "Adapters",
    "evaluations": "Evaluations",
    "learning": "Learning",
    "batches": "Batches and files",
    "sessions": "Sessions",
    "keys": "Keys and limits",
    "events": "Events and logs",
}
PROMPT = {"role": "user", "content": "What is 12 plus 7?"}


@pytest.fixture(scope="module")
def adapter(stack: Stack) -> Iterator[str]:
    """An adapter with one version, whose name is as long as names may be."""
    name = f"a-name-that-is-rather-long-for-a-table-{uuid.uuid4().hex[:8]}"
    example = {"prompt": "hello", "completion": "Good day!"}
    body = {"adapter": name, "attach": False, "epochs": 3, "examples": [example]}
    job = httpx.post(f"{stack.url}/v1/train/sft", json=body, timeout=PATIENCE).raise_for_status().json()
    with httpx.stream("GET", f"{stack.url}/v1/train/jobs/{job['id']}/events", timeout=120) as events:
        assert '"succeeded"' in [line for line in events.iter_lines() if line.startswith("data:")][-1]
    yield name
    httpx.delete(f"{stack.url}/v1/adapters/{name}", timeout=PATIENCE).raise_for_status()


def test_axe_finds_nothing(chromium: Browser, stack: Stack, adapter: str) -> None:
    """In light on a wide screen and in dark on a narrow one: a page is loaded once, and changed under its reader."""
    reader = Reader.of(chromium, stack.url)
    looks: list[tuple[Literal["light", "dark"], int]] = [("light", 1280), ("dark", 360)]
    found = {}
    for path, heading in PAGES.items():
        page = reader.open(path, heading)
        if path == "chat":
            page.get_by_label("Show token probabilities").check()
            page.get_by_label("Message").fill("Hi")
            page.keyboard.press("Enter")
            page.get_by_role("button", name="Ask again").wait_for()
        if path == "events":
            page.get_by_role("tab", name="Gateway and engines").click()
            page.get_by_label("Logs").wait_for()
        for scheme, width in looks:
            reader.look(scheme, width)
            reader.picture(f"all/{path.replace('/', '-')}-{scheme}-{width}")
            found[path, scheme, width] = (reader.violations(), reader.overflow())
    reader.context.close()
    assert reader.complaints == []
    assert found == dict.fromkeys([(path, *look) for path in PAGES for look in looks], ([], 0))


def test_overview_shows_what_runs(reader: Reader, stack: Stack) -> None:
    body = {"model": "qwen3.5", "messages": [PROMPT], "max_tokens": 20_000, "ignore_eos": True, "stream": True}
    page = reader.open("overview", "Overview")
    began, enough = threading.Event(), threading.Event()

    def stream() -> None:
        with httpx.stream("POST", f"{stack.url}/v1/chat/completions", json=body, timeout=60) as answer:
            for _ in answer.iter_lines():
                began.set()
                if enough.is_set():
                    return

    running = threading.Thread(target=stream)
    running.start()
    assert began.wait(30)
    row = page.get_by_label("Requests now").get_by_role("row").nth(1)
    expect(row).to_contain_text("decode")
    expect(row).to_contain_text("base")
    expect(page.get_by_role("img", name="Memory plan")).to_have_attribute(
        "aria-label", re.compile(r"weights [0-9.]+ [KM]iB")
    )
    rates = page.locator("figure[aria-label^='Tokens per second']")
    expect(rates).to_have_attribute("aria-label", re.compile(r"answers [1-9]"))
    reader.picture("dashboard-overview", after=25)
    page.get_by_role("link", name="Keys and limits").click()
    page.get_by_role("heading", level=1, name="Keys and limits").wait_for()
    page.get_by_role("link", name="Overview").click()
    page.get_by_role("heading", level=1, name="Overview").wait_for()
    kept = rates.get_attribute("aria-label")
    assert re.search(r"answers \d", kept or ""), "the curves go on where they were when the page was left"
    enough.set()
    running.join()
    expect(page.get_by_text("Nothing runs right now")).to_be_visible()


def test_token_probabilities_by_keys(reader: Reader) -> None:
    page = reader.open("chat", "Chat")
    page.get_by_label("Show token probabilities").check()
    page.get_by_label("Message").fill(PROMPT["content"])
    page.keyboard.press("Enter")
    tokens = page.get_by_role("group", name="Tokens of the answer")
    page.get_by_role("button", name="Ask again").wait_for()
    tokens.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token.chosen")).to_have_count(1)
    expect(page.locator(".token-card li")).to_have_count(5)
    expect(page.locator(".token-card li").first).to_contain_text("%")


def test_tools_are_shown_and_answered(reader: Reader) -> None:
    page = reader.open("chat", "Chat")
    page.get_by_text("System prompt, stop strings, tools").click()
    page.get_by_label("Tools").fill("no list")
    page.get_by_label("Message").fill("hi")
    page.keyboard.press("Enter")
    expect(page.get_by_role("status").filter(has_text="Tools:")).to_be_visible()


def test_a_job_from_a_file_and_its_end(reader: Reader, stack: Stack, tmp_path: Path) -> None:
    name = f"from-a-file-{uuid.uuid4().hex[:6]}"
    file = tmp_path / "examples.jsonl"
    rows = [{"prompt": f"number {n}", "completion": str(n)} for n in range(64)]
    file.write_text("\n".join(map(json.dumps, rows)))
    page = reader.open("jobs/new", "New job")
    page.get_by_label("Adapter", exact=True).fill(name)
    page.get_by_label("File").set_input_files(file)
    expect(page.get_by_text("64 rows")).to_be_visible()
    page.get_by_label("Epochs").fill("1000")
    page.get_by_role("button", name="Submit the job").click()
    page.get_by_role("heading", name="Job", exact=True).wait_for()
    page.get_by_role("button", name="Pause", exact=True).click()
    expect(page.get_by_text("paused", exact=True).first).to_be_visible(timeout=60_000)
    page.get_by_role("button", name="Resume", exact=True).click()
    # Its events say "running", too, of the time before the pause.
    expect(page.get_by_role("progressbar", name="Steps")).to_be_visible(timeout=60_000)
    page.get_by_role("button", name="Cancel", exact=True).click()
    expect(page.get_by_role("dialog")).to_contain_text("no version is made", timeout=5000)
    reader.agree("Cancel the job")
    expect(page.get_by_text("cancelled", exact=True).first).to_be_visible(timeout=60_000)
    page = reader.open("jobs", "Jobs")
    page.get_by_label("Adapter", exact=True).fill(name)
    expect(page.get_by_label("Jobs").get_by_role("row")).to_have_count(2)


@pytest.mark.thorough
def test_two_jobs_in_one_plot(reader: Reader, adapter: str) -> None:
    page = reader.open("jobs", "Jobs")
    boxes = page.get_by_role("checkbox")
    boxes.nth(0).check()
    boxes.nth(1).check()
    page.get_by_role("link", name="Compare 2").click()
    page.get_by_role("heading", name="2 jobs").wait_for()
    page.get_by_role("button", name="Only what differs").click()
    expect(page.get_by_label("Settings").get_by_role("columnheader")).to_have_count(3)
    reader.check()


def test_an_adapter_is_attached_downloaded_and_deleted(
    reader: Reader, stack: Stack, adapter: str, unattached: None
) -> None:
    page = reader.open(f"adapters/{adapter}", "Adapters")
    page.get_by_role("button", name="Attach", exact=True).click()
    reader.agree("Attach")
    expect(page.get_by_text(f"{adapter}@1 answers for the base model's name.")).to_be_visible()
    with page.expect_download() as kept:
        page.get_by_role("button", name="Download").click()
    assert kept.value.suggested_filename == f"{adapter}@1.tar.gz"
    page.get_by_role("button", name="Delete").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(f"{adapter}@1 is attached")
    expect(dialog.get_by_role("button", name="Delete all versions")).to_be_disabled()
    reader.check()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    page.get_by_role("button", name="Detach").click()
    reader.agree("Detach")
    expect(page.get_by_text("The base model answers for its own name.")).to_be_visible()
    assert httpx.get(f"{stack.url}/v1/adapters", timeout=PATIENCE).json()["attached"] is None


@pytest.mark.thorough
def test_a_suite_its_run_and_its_items(reader: Reader, stack: Stack) -> None:
    name = f"sums-{uuid.uuid4().hex[:6]}"
    page = reader.open("evaluations", "Evaluations")
    page.get_by_role("tab", name="Runs").focus()
    page.keyboard.press("ArrowRight")
    page.get_by_label("Name").fill(name)
    page.get_by_label("An answer is right by").select_option("numeric")
    page.get_by_label("Most tokens").fill("8")
    items = [{"prompt": f"What is {n} plus 7?", "expected": n + 7} for n in range(10, 14)]
    page.get_by_label("Items").fill("\n".join(map(json.dumps, items)))
    page.get_by_role("button", name="Make the suite").click()
    expect(page.get_by_label("Suites").get_by_text(f"{name}@1")).to_be_visible()
    page.get_by_role("tab", name="Runs").click()
    page.get_by_label(f"{name}@1").check()
    page.get_by_role("button", name="Run 1 suite on 1 target").click()
    page.get_by_role("heading", name="Evaluation", exact=True).wait_for()
    expect(page.get_by_label("Comparison").get_by_role("row").nth(1)).to_contain_text("%", timeout=60_000)
    expect(page.get_by_label("Items").get_by_role("row")).to_have_count(5)
    reader.check()
    httpx.delete(f"{stack.url}/v1/eval/suites/{name}", timeout=PATIENCE).raise_for_status()


def test_a_batch_and_its_results(reader: Reader, tmp_path: Path) -> None:
    body = {"model": "qwen3.5", "messages": [PROMPT], "max_tokens": 4}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    file = tmp_path / f"questions-{uuid.uuid4().hex[:6]}-of-a-name-that-is-rather-long-for-a-table <img src=x>.jsonl"
    file.write_text(json.dumps(line))
    page = reader.open("batches", "Batches and files")
    page.get_by_label("File of requests").set_input_files(file)
    page.get_by_role("button", name="Send and queue").click()
    results = (
        page.get_by_label("Batches", exact=True)
        .get_by_role("row", name=file.name)
        .get_by_role("button", name="Results")
    )
    results.wait_for(timeout=60_000)
    with page.expect_download() as kept:
        results.click()
    assert json.loads(kept.value.path().read_text())["custom_id"] == "a"
    reader.check()
    page.get_by_label("Files").get_by_role("row", name=file.name).get_by_role("button", name="Delete").click()
    reader.agree("Delete the file")
    expect(page.get_by_text("The file is deleted.")).to_be_visible()


@pytest.mark.thorough
def test_a_session_is_saved_and_forgotten(reader: Reader, stack: Stack) -> None:
    name = f"talk/ä?#%20<img src=x>{uuid.uuid4().hex[:6]}"
    body = {"model": "qwen3.5", "messages": [PROMPT], "max_tokens": 4, "session_id": name}
    httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=PATIENCE).raise_for_status()
    page = reader.open("sessions", "Sessions")
    row = page.get_by_role("row", name=name)
    row.wait_for()
    reader.check()
    row.get_by_role("button", name="Forget").click()
    expect(page.get_by_role("dialog")).to_contain_text("Its next request is computed from the beginning.")
    reader.agree("Forget the session")
    expect(row).to_have_count(0)


@pytest.mark.thorough
def test_events_are_filtered(reader: Reader, adapter: str) -> None:
    page = reader.open("events", "Events and logs")
    lines = page.get_by_label("Events", exact=True).get_by_role("listitem")
    page.get_by_label("Has").fill(f"{adapter}@1")
    page.get_by_label("Kind").select_option("published")
    expect(lines).to_have_count(1)
    page.get_by_role("tab", name="Requests of this page").click()
    expect(page.get_by_label("Requests of this page").get_by_text("/v1/keys")).to_have_count(1)


@pytest.mark.thorough
def test_processes_are_followed(reader: Reader, stack: Stack) -> None:
    page = reader.open("events", "Events and logs")
    page.get_by_role("tab", name="Gateway and engines").click()
    lines = page.get_by_label("Logs").get_by_role("listitem")
    lines.first.wait_for()
    reader.picture("dashboard-logs")
    name = f"look-{uuid.uuid4().hex}"
    page.get_by_label("Request").fill(name)
    expect(page.get_by_text("No line is like this")).to_be_visible()
    httpx.get(f"{stack.url}/v1/models", headers={"x-request-id": name}, timeout=PATIENCE).raise_for_status()
    expect(lines).to_have_count(1)
    expect(lines).to_contain_text("gateway: request")
    page.get_by_label("Level").select_option("warning")
    expect(page.get_by_text("No line is like this")).to_be_visible()
    page.get_by_label("Request").fill("")
    page.get_by_label("Level").select_option("info")
    page.get_by_label("Has").fill("memory plan")
    process = page.get_by_label("Process")
    process.select_option(process.locator("option").last.inner_text())
    expect(lines).to_have_count(1)


def test_a_batch_that_cannot_be_read_says_why(reader: Reader, tmp_path: Path) -> None:
    file = tmp_path / f"broken-{uuid.uuid4().hex[:6]}.jsonl"
    file.write_text("no JSON")
    page = reader.open("batches", "Batches and files")
    page.get_by_label("File of requests").set_input_files(file)
    page.get_by_role("button", name="Send and queue").click()
    row = page.get_by_label("Batches", exact=True).get_by_role("row", name=file.name)
    expect(row).to_contain_text("line 1: the line is not valid JSON", timeout=60_000)


def test_what_a_later_release_wrote_is_named(reader: Reader, stack: Stack) -> None:
    body = {
        "adapter": "of-tomorrow",
        "attach": False,
        "dry_run": True,
        "examples": [{"prompt": "a", "completion": "b"}],
    }
    job = httpx.post(f"{stack.url}/v1/train/sft", json=body, timeout=PATIENCE).raise_for_status().json()["id"]
    place = f"temper:job:{job}"
    with redis.Redis.from_url(stack.settings.redis_url.get_secret_value()) as kept:
        before = kept.hget(place, "schema")
        assert before is not None
        kept.hset(place, "schema", "99")
        page = reader.open("jobs", "Jobs")
        expect(page.get_by_role("note")).to_have_text(f"Not shown, as a later release of Temper wrote it: {job}")
        kept.hset(place, "schema", before)


@pytest.mark.thorough
def test_an_answer_that_breaks_off_says_so(reader: Reader) -> None:
    page = reader.open("chat", "Chat")
    chunk = {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {"content": "Half an ans"}, "finish_reason": None}]}
    half = {"status": 200, "content_type": "text/event-stream", "body": f"data: {json.dumps(chunk)}\n\n"}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**half))
    page.get_by_label("Message").fill("hi")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("The server ended the answer before it was whole.")
    expect(page.locator(".answer-text")).to_have_text("Half an ans")


def test_addresses_that_lead_nowhere(reader: Reader) -> None:
    page = reader.open("no/%zz/page", "Not found")
    assert reader.violations() == []
    page = reader.open("adapters/%zz", "Adapters")
    expect(page.get_by_role("main")).to_contain_text(re.compile("There is no adapter %zz|No adapter yet"))


@pytest.mark.thorough
def test_long_lists_are_shown_page_by_page(reader: Reader) -> None:
    def session(number: int) -> dict[str, object]:
        numbers = {"tokens": 1, "requests": 1, "used_at": 1.0, "expires_at": 1.0}
        return {"id": f"talk-{number}", "adapter": None, "bytes": {}, "saved": False, **numbers}

    def answer(route: Route) -> None:
        query = parse_qs(urlsplit(route.request.url).query)
        first = int(query.get("after", ["talk-0"])[0].partition("-")[2]) + 1
        last = min(first + int(query["limit"][0]), 151)
        route.fulfill(json={"object": "list", "data": [session(number) for number in range(first, last)]})

    reader.page.route("**/v1/sessions?*", answer)
    page = reader.open("sessions", "Sessions")
    rows = page.get_by_label("Sessions", exact=True).get_by_role("row")
    expect(rows).to_have_count(101)
    page.get_by_role("button", name="Show more than 100").click()
    expect(rows).to_have_count(151)
    expect(page.get_by_role("button", name="Show more")).to_have_count(0)


def test_a_page_that_cannot_be_reached_says_so(reader: Reader) -> None:
    refusal = {"error": {"message": "<b>away</b>"}}
    reader.page.route("**/v1/status", lambda route: route.fulfill(status=503, json=refusal))
    page = reader.open("overview", "Overview")
    expect(page.get_by_role("alert")).to_contain_text("<b>away</b>")
    assert reader.violations() == []
    page = reader.open("keys", "Keys and limits")
    page.route("**/v1/keys", lambda route: route.abort())
    page.get_by_role("button", name="Refresh").click()
    expect(page.get_by_role("alert")).to_contain_text("Temper cannot be reached")
    page.unroute("**/v1/keys")
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("alert")).to_have_count(0)
    reader.complaints.clear()  # the browser itself says that a request failed

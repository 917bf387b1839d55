"""The dashboard of a gateway with keys, in front of the shared Temper's engine; and what its policy keeps out."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, expect

from cli.local.ports import claim_ports
from services.common.security.api_keys import Scope
from tests.browser.conftest import Reader
from tests.stack import PATIENCE, ROOT, Stack, clean_environment
from tests.unit.gateway.key_file import Keys


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    keys = Keys(tmp_path_factory.mktemp("keys") / "keys.json")
    keys.add("reader", Scope.INFERENCE)
    keys.add("admin", *Scope)
    return keys


@pytest.fixture(scope="module")
def guarded(stack: Stack, keys: Keys) -> Iterator[str]:
    """The address of a second gateway of the shared Temper, which asks for keys."""
    (port,) = claim_ports(1)
    shared = stack.settings
    tls = stack.data_dir / "tls"
    environment = clean_environment(
        {
            "TEMPER_PORT": str(port.number),
            "TEMPER_ENGINES": f"127.0.0.1:{stack.state['ports']['engine']}",
            "TEMPER_GRPC_TLS_CERT": str(tls / "tls.crt"),
            "TEMPER_GRPC_TLS_KEY": str(tls / "tls.key"),
            "TEMPER_GRPC_TLS_CA": str(tls / "tls.crt"),
            "TEMPER_REDIS_URL": shared.redis_url.get_secret_value(),
            "TEMPER_S3_ENDPOINT": shared.s3_endpoint,
            "TEMPER_S3_ACCESS_KEY": shared.s3_access_key.get_secret_value(),
            "TEMPER_S3_SECRET_KEY": shared.s3_secret_key.get_secret_value(),
            "TEMPER_S3_SECURE": "false",
            "TEMPER_API_KEYS_FILE": str(keys.path),
            "TEMPER_BATCH_WORKERS": "0",
        }
    )
    log = Path(keys.path).with_name("gateway.log")
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.gateway"], env=environment, cwd=ROOT, stdout=output, stderr=output
        )
    url = f"http://127.0.0.1:{port.number}"
    deadline = time.monotonic() + 180
    while True:
        try:
            if httpx.get(f"{url}/readyz", timeout=PATIENCE).status_code == 200:
                break
        except httpx.TransportError:
            assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    yield url
    process.terminate()
    process.wait(60)


def test_a_key_is_asked_for_and_decides_what_is_shown(chromium: Browser, guarded: str, keys: Keys) -> None:
    reader = Reader.of(chromium, guarded)
    page = reader.open("overview")
    field = page.get_by_label("API key")
    field.wait_for()
    assert reader.violations() == []
    field.fill("tp-nobody")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("this API key is not valid here")
    field.fill(keys.secrets["reader"])
    page.keyboard.press("Enter")
    page.get_by_role("heading", level=1, name="Overview").wait_for()
    names = page.get_by_role("navigation", name="Pages").get_by_role("link").all_inner_texts()
    assert names == ["Overview", "Chat", "Adapters", "Batches", "Sessions", "Keys and limits", "Events and logs"]
    assert page.get_by_text("What trains now").count() == 0
    assert keys.secrets["reader"] not in page.evaluate(
        "JSON.stringify([{...sessionStorage}, {...localStorage}, document.cookie])"
    )
    page.reload()
    field.wait_for()  # it was kept in memory only

    field.fill(keys.secrets["admin"])
    page.get_by_label("Keep it until this tab is closed").check()
    page.keyboard.press("Enter")
    page.get_by_role("heading", level=1, name="Overview").wait_for()
    page.reload()
    page.get_by_role("link", name="Keys and limits").click()
    expect(page.get_by_label("Keys", exact=True).get_by_role("row")).to_have_count(3)
    page.get_by_role("link", name="Chat").click()
    page.get_by_label("Show token probabilities").check()
    assert page.evaluate("sessionStorage.length") == 2
    page.get_by_role("button", name="Forget the key").click()
    field.wait_for()
    assert page.evaluate("sessionStorage.length") == 0
    reader.context.close()
    refusals = [text for text in reader.complaints if "401" not in text]
    assert refusals == [], "a browser says of each refused key that it was refused"


@pytest.mark.thorough
def test_what_is_open_waits_for_the_next_key_of_the_same_name(chromium: Browser, guarded: str, keys: Keys) -> None:
    keys.add("guest", Scope.INFERENCE)

    def until(status: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while httpx.get(f"{guarded}/v1/models", headers=keys.bearer("guest"), timeout=PATIENCE).status_code != status:
            assert time.monotonic() < deadline, "the gateway has not read its keys again"
            time.sleep(0.1)

    until(200)
    reader = Reader.of(chromium, guarded)
    page = reader.open("chat")
    field = page.get_by_label("API key")
    field.fill(keys.secrets["guest"])
    page.keyboard.press("Enter")
    page.get_by_label("Message").fill("Remember the number 41.")
    message = page.get_by_text("Remember the number 41.")
    page.wait_for_load_state("networkidle")  # nothing that the page itself asks for meets the key that has run out

    keys.change("guest", expires_at=datetime(2026, 1, 1, tzinfo=UTC))
    until(401)
    page.keyboard.press("Enter")
    field.wait_for()
    assert reader.violations() == []
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    expect(field).to_be_visible()
    expect(message).to_be_hidden()

    keys.add("guest", Scope.INFERENCE)
    until(200)
    field.fill(keys.secrets["guest"])
    page.keyboard.press("Enter")
    expect(message).to_be_visible()

    keys.change("guest", expires_at=datetime(2026, 1, 1, tzinfo=UTC))
    until(401)
    page.get_by_label("Message").fill("Again.")
    page.keyboard.press("Enter")
    field.fill(keys.secrets["reader"])
    page.keyboard.press("Enter")
    expect(page.get_by_role("contentinfo")).to_contain_text(keys.entries["reader"].id)
    expect(message).to_have_count(0)
    assert page.evaluate("Object.keys(sessionStorage).filter((name) => name.startsWith('temper.key'))") == []
    reader.context.close()


def test_other_pages_cannot_act(chromium: Browser, guarded: str, stack: Stack) -> None:
    """The page of another site, which has no key, and its frames."""
    reader = Reader.of(chromium, stack.url)
    page = reader.open("keys", "Keys and limits")
    body = "{method: 'POST', headers: {'content-type': 'text/plain'}, body: '{}'}"
    asked = f"fetch('{guarded}/v1/adapters/x/detach', {body}).then(() => 'read', () => 'refused')"
    assert page.evaluate(asked) == "refused"
    framed = f"""new Promise((resolve) => {{
        const frame = document.createElement('iframe');
        frame.onload = () => {{
            try {{ resolve(frame.contentDocument?.title ?? 'closed'); }} catch {{ resolve('closed'); }}
        }};
        frame.src = '{stack.url}/ui/';
        document.body.append(frame);
    }})"""
    assert page.evaluate(framed) != "Overview · Temper"
    reader.context.close()


def test_the_policy_holds(chromium: Browser, stack: Stack) -> None:
    """Without axe's way around it: every page works under its policy, which keeps foreign scripts out."""
    context = chromium.new_context()
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    for path, heading in (("adapters", "Adapters"), ("chat", "Chat"), ("jobs", "Jobs"), ("overview", "Overview")):
        page.goto(f"{stack.url}/ui/#/{path}")
        page.get_by_role("heading", level=1, name=heading, exact=True).wait_for()
    page.locator(".u-wrap").first.wait_for()  # plots set styles, which the policy allows scripts that it lets in
    assert complaints == []
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.hacked = 1'}))"
    )
    assert page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in text for text in complaints)
    context.close()

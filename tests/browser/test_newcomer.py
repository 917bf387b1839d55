"""A newcomer's path: chat, thumbs down and a corrected answer, train on it, see the curve, compare old and new, roll
back. docs/guides/dashboard.md tells it; with TEMPER_SCREENSHOTS=DIRECTORY its pictures are made here."""

from __future__ import annotations

import uuid

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Reader
from tests.stack import PATIENCE, Stack

QUESTION = "Who keeps the lighthouse?"
OLD, NEW = "Nobody knows.", "Mira keeps it."


def send(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def answers(page: Page) -> list[str]:
    expect(page.get_by_role("button", name="Ask again").last).to_be_visible(timeout=30_000)
    return [text.strip() for text in page.locator(".answer-text").all_inner_texts()]


def train(page: Page, adapter: str, epochs: str) -> None:
    """Corrects the last answer and trains on what was collected; the page of the job is shown at the end."""
    page.get_by_label("Adapter", exact=True).fill(adapter)
    page.get_by_label("Epochs").fill(epochs)
    page.get_by_role("button", name="Train on 1 example").click()
    page.get_by_role("heading", name="Job", exact=True).wait_for()


def correct(page: Page, text: str) -> None:
    page.get_by_role("button", name="Bad answer").last.click()
    page.get_by_role("button", name="Correct", exact=True).last.click()
    page.get_by_label("The answer as it should be").fill(text)
    page.get_by_role("button", name="Keep as a training example").click()


@pytest.mark.usefixtures("unattached")
def test_the_path(reader: Reader, stack: Stack) -> None:
    name = f"newcomer-{uuid.uuid4().hex[:6]}"
    page = reader.open("chat", "Chat")
    page.get_by_label("Most tokens").fill("16")
    page.get_by_label("Temperature").fill("0")

    send(page, QUESTION)
    before = answers(page)[0]
    assert before not in (OLD, NEW)
    correct(page, OLD)
    reader.picture("dashboard-chat")
    train(page, name, "20")
    expect(page.get_by_text("succeeded", exact=True).first).to_be_visible(timeout=60_000)
    expect(page.locator(".u-legend").first).to_contain_text(name)
    expect(page.locator(".u-legend .u-value").first, "the latest step, where no pointer is").to_have_text("20")

    # The version answers as it was told, and learns another answer.
    page.get_by_role("link", name="Compare in the chat").click()
    page.get_by_label("Two side by side").uncheck()
    send(page, QUESTION)
    assert answers(page) == [OLD]
    correct(page, NEW)
    train(page, name, "20")
    expect(page.get_by_text("succeeded", exact=True).first).to_be_visible(timeout=60_000)
    expect(page.get_by_role("heading", name="loss", exact=True)).to_be_visible()
    reader.picture("dashboard-job")

    # Old and new on one prompt.
    page.get_by_role("link", name="Compare in the chat").click()
    page.get_by_label("Right").select_option(f"{name}@1")
    send(page, QUESTION)
    assert answers(page) == [NEW, OLD]
    reader.picture("dashboard-side-by-side")
    with page.expect_response("**/v1/feedback"):
        page.get_by_role("button", name="Prefer this").first.click()
    expect(page.get_by_role("heading", name="Examples: 1")).to_be_visible()
    said = httpx.get(f"{stack.url}/v1/feedback?limit=2", timeout=PATIENCE).json()["data"]
    assert [(one["thumb"], one["correction"]) for one in said[1:]] == [("down", NEW)]
    assert said[0]["preferred_over"].startswith("chatcmpl-")

    page = reader.open(f"adapters/{name}", "Adapters")
    expect(page.get_by_role("heading", name="Metrics of its last step")).to_be_visible()
    reader.picture("dashboard-adapters")
    page.get_by_role("button", name="Roll back").click()
    expect(page.get_by_role("dialog")).to_contain_text(f"{name}@1 becomes current in the place of {name}@2")
    reader.agree("Roll back")
    expect(page.locator(".node", has_text=f"{name}@1")).to_contain_text("current")
    assert httpx.get(f"{stack.url}/v1/adapters/{name}", timeout=PATIENCE).json()["version"] == f"{name}@1"
    httpx.delete(f"{stack.url}/v1/adapters/{name}", timeout=PATIENCE).raise_for_status()

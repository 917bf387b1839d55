"""Debian's Chromium, and pages in it that may not complain."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from axe_playwright_python.base import AXE_FILE_PATH
from playwright.sync_api import Browser, BrowserContext, Page, Playwright, Response, sync_playwright

from tests.missing import missing
from tests.stack import Stack

WAIT_MS = 20_000
AXE = AXE_FILE_PATH.read_text()


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    """The browser; its sandbox wants another user than root, in whose name tests run in containers.

    It ends with this package's tests: until then Playwright's event loop runs in this thread, where asyncio starts no
    other.
    """
    path = shutil.which("chromium")
    if path is None:
        missing("Chromium is missing: .ci/tools installs it")
    playwright: Playwright
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Reader:
    """Somebody in front of the dashboard of one Temper."""

    context: BrowserContext
    url: str
    page: Page
    complaints: list[str] = field(default_factory=list)
    """What the console said, pages that threw, and answers of other servers."""

    @classmethod
    def of(cls, browser: Browser, url: str, **options: Any) -> Reader:
        # The tests put axe into the pages, which their policy forbids; test_policy has a context that obeys it.
        context = browser.new_context(**{"bypass_csp": True, "accept_downloads": True, **options})
        context.set_default_timeout(WAIT_MS)
        context.add_init_script(AXE)
        page = context.new_page()
        reader = cls(context, url, page)
        page.on("console", lambda message: reader._heard(message.type, message.text))
        page.on("pageerror", lambda error: reader.complaints.append(str(error)))
        page.on("response", reader._answered)
        return reader

    def _heard(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(text)

    def _answered(self, response: Response) -> None:
        if not response.url.startswith((self.url, "blob:", "data:")):
            self.complaints.append(f"asked another server: {response.url}")

    def open(self, path: str, heading: str | None = None) -> Page:
        """Shows a page of the dashboard, once it has its heading."""
        self.page.goto(f"{self.url}/ui/#/{path}")
        if heading is not None:
            self.page.get_by_role("heading", level=1, name=heading, exact=True).wait_for()
        return self.page

    def look(self, scheme: Literal["light", "dark"], width: int) -> None:
        """Changes colours and width of the window under the page."""
        self.page.set_viewport_size({"width": width, "height": 800})
        self.page.emulate_media(color_scheme=scheme)

    def violations(self) -> list[str]:
        """What axe finds on the page as it is."""
        self.page.locator(".loading").first.wait_for(state="detached")
        found = self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
        return [f"{one['id']}: {one['help']}: {node['html'][:200]}" for one in found for node in one["nodes"]]

    def check(self) -> None:
        """Axe finds nothing on the page as it is, filled by a test; it fits a narrow window, too."""
        size = self.page.viewport_size
        assert size is not None
        self.look("dark", 360)
        found = (self.violations(), self.overflow())
        self.look("light", size["width"])
        assert found == ([], 0)

    def overflow(self) -> int:
        """Pixels by which the page is wider than its window."""
        wide = self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        return int(wide)

    def picture(self, name: str, after: float = 0.3) -> None:
        """Takes a picture for the documentation, where it is asked for.

        Args:
            after: seconds until what is shown has settled.
        """
        if directory := os.environ.get("TEMPER_SCREENSHOTS"):
            self.page.mouse.move(0, 0)
            self.page.wait_for_timeout(after * 1000)
            self.page.screenshot(path=Path(directory) / f"{name}.png")

    def agree(self, button: str) -> None:
        """Agrees in the dialog that asks before something happens."""
        self.page.get_by_role("dialog").get_by_role("button", name=button, exact=True).click()


@pytest.fixture
def reader(chromium: Browser, stack: Stack) -> Iterator[Reader]:
    """Somebody in front of the shared Temper's dashboard. It may not have complained at the end."""
    reader = Reader.of(chromium, stack.url, viewport={"width": 1280, "height": 800})
    yield reader
    reader.context.close()
    assert reader.complaints == []

"""The dashboard in a browser: first paint, interactions beside streams, long curves, and what is loaded.

    python -m benchmarks.gateway.http.dashboard --url http://localhost:8420 [--streams 50] [--chromium PATH]

Needs a running Temper and Playwright. The streams are chats of this process through the same gateway. An interaction is
a click on the dashboard, from its event to the frame that shows what it changed.
"""

from __future__ import annotations

import argparse
import json
import threading
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Page, sync_playwright

from cli.http.load.figures import percentile

_INTERACTIONS = 60
_POINTS = 10_000
_CURVES = 4
# From an event to the frame after the one in which the page was drawn anew.
_TIMED = """async (selector) => {
    const element = document.querySelector(selector);
    const began = performance.now();
    element.click();
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    return performance.now() - began;
}"""
_FRAMES = """async ({ points, curves }) => {
    const vendored = document.querySelector('link[rel=modulepreload]').href.replace(/vendor.*/, 'vendor/uplot.js');
    const { default: UPlot } = await import(vendored);
    const steps = Array.from({ length: points }, (_, step) => step);
    const value = (step, curve) => Math.sin(step / 500 + curve) + Math.random() / 5;
    const columns = Array.from({ length: curves }, (_, curve) => steps.map((step) => value(step, curve)));
    const place = document.body.appendChild(document.createElement('div'));
    const series = columns.map((_, index) => ({ label: String(index), stroke: 'teal' }));
    const began = performance.now();
    const options = { width: 900, height: 300, scales: { x: { time: false } }, series: [{}, ...series] };
    const plot = new UPlot(options, [steps, ...columns], place);
    const first = performance.now() - began;
    const turns = async (change) => {
        const frames = [];
        let before = performance.now();
        for (let turn = 0; turn < 60; turn += 1) {
            change(turn);
            await new Promise((done) => requestAnimationFrame(done));
            frames.push(performance.now() - before);
            before = performance.now();
        }
        return frames;
    };
    const pointed = await turns((turn) => plot.setCursor({ left: 10 + turn * 12, top: 100 }));
    const redrawn = await turns(() => plot.setData([steps, ...columns]));
    place.remove();
    return { first, pointed, redrawn };
}"""


class Streams:
    """Chats that stream until they are stopped.

    Args:
        url: of the gateway.
        count: streams at a time.
    """

    def __init__(self, url: str, count: int) -> None:
        self._url = url
        self._stop = threading.Event()
        self._begun = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(count)]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            self._begun.acquire()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        model = httpx.get(f"{self._url}/v1/models", timeout=60).json()["data"][0]["id"]
        message = {"role": "user", "content": f"Count from {number}."}
        body = {"model": model, "messages": [message], "stream": True, "ignore_eos": True, "max_tokens": 2000}
        begun = False
        while not self._stop.is_set():
            with httpx.stream("POST", f"{self._url}/v1/chat/completions", json=body, timeout=120) as answer:
                for line in answer.iter_lines():
                    if not begun and line:
                        begun = True
                        self._begun.release()
                    if self._stop.is_set():
                        return


def interactions(page: Page) -> list[float]:
    """Milliseconds of clicks between pages, and of typing controls on them."""
    times = []
    for turn in range(_INTERACTIONS // 3):
        for path in ("chat", "keys", "overview"):
            times.append(page.evaluate(_TIMED, f'nav a[href="#/{path}"]'))
            page.wait_for_timeout(150 + turn % 3 * 50)
    return times


def measure(url: str, streams: int, chromium: str) -> dict[str, Any]:
    """All figures; times in milliseconds."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{url}/ui/")
        page.get_by_role("heading", level=1, name="Overview").wait_for()
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        shown = page.evaluate("performance.now()")
        sizes = page.evaluate("performance.getEntriesByType('resource').map((one) => one.transferSize)")
        idle = interactions(page)
        with Streams(url, streams):
            busy = interactions(page)
        curves = page.evaluate(_FRAMES, {"points": _POINTS, "curves": _CURVES})
        browser.close()
    return {
        "first_paint_ms": paint,
        "page_with_figures_ms": shown,
        "bytes_loaded": sum(sizes),
        "interaction_p50_idle_ms": percentile(idle, 0.5),
        "interaction_p95_idle_ms": percentile(idle, 0.95),
        "streams": streams,
        "interaction_p50_ms": percentile(busy, 0.5),
        "interaction_p95_ms": percentile(busy, 0.95),
        "curves": f"{_CURVES} x {_POINTS}",
        "curves_first_drawing_ms": curves["first"],
        "curves_frame_pointing_p95_ms": percentile(curves["pointed"], 0.95),
        "curves_frame_new_data_p50_ms": percentile(curves["redrawn"], 0.5),
        "curves_frame_new_data_p95_ms": percentile(curves["redrawn"], 0.95),
        "requests_to_others": [one for one in asked if not one.startswith((url, "data:", "blob:"))],
    }


def main() -> None:
    """Prints the figures as JSON, and keeps them with --output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8420")
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    figures = measure(options.url, options.streams, options.chromium)
    print(json.dumps(figures, indent=2))
    if options.output is not None:
        options.output.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()

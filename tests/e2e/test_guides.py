"""The guides against a default `temper up`: every block of a page, one after another, as it is written there, and the
answers that the page promises. tests/guides/blocks.py has the comments by which a block is left out."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cli.local.ports import ClaimedPort, claim_ports
from tests.guides.blocks import Block, pages, read
from tests.guides.reader import Reader
from tests.stack import PATIENCE, ROOT, Stack, clean_environment

KINDS = tuple(
    f"training/{kind}" for kind in ("draft", "environments", "kto", "opd", "receipts", "rollouts", "trajectories")
)
JOBS = ("adapters", "evaluation", "forge", "learning-loop", "tinker", "training", *KINDS)
THOROUGH = (*(f"docs/guides/{name}.md" for name in (*JOBS, "compatibility", "install")), "docs/tutorials/research.md")
"""Pages with many jobs or processes, whose commands test_cli.py, tests/conformance and tests/integration run, too."""
PAGES = {str(page.relative_to(ROOT)): [block for block in read(page) if block.runs] for page in pages()}


GAME = "127.0.0.1:8430"
"""Where the guides have the environment `guess` served."""


@pytest.fixture(scope="module")
def port() -> ClaimedPort:
    """Of the environment."""
    return claim_ports(1)[0]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, port: ClaimedPort) -> Iterator[Stack]:
    """What a newcomer has: no data, the default name, and no settings but the list with the environment."""
    allowed = {"TEMPER_REWARD_WEBHOOKS": f"http://127.0.0.1:{port.number}"}
    with Stack(tmp_path_factory.mktemp("guides") / "data", env=allowed) as running:
        yield running


@contextlib.contextmanager
def game(port: int) -> Iterator[None]:
    """The environment, as its command serves it."""
    command = (sys.executable, "-m", "cli", "environments", "serve", "guess", "--port", str(port))
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=clean_environment()) as process:
        try:
            # It is asked until it listens: its one line on stdout comes before.
            transport = httpx.HTTPTransport(retries=10)
            with httpx.Client(transport=transport, timeout=PATIENCE, trust_env=False) as http:
                assert http.get(f"http://127.0.0.1:{port}/health").status_code == 200
            yield
        finally:
            process.terminate()


@pytest.mark.usefixtures("unattached")
@pytest.mark.parametrize(
    "blocks",
    [
        pytest.param(blocks, id=page, marks=[pytest.mark.thorough] * (page in THOROUGH))
        for page, blocks in PAGES.items()
        if blocks
    ],
)
def test_page_runs_as_written(stack: Stack, port: ClaimedPort, blocks: list[Block], tmp_path: Path) -> None:
    served = f"127.0.0.1:{port.number}"
    plays = any(GAME in block.code for block in blocks)
    with game(port.number) if plays else contextlib.nullcontext(), Reader(stack, tmp_path, {GAME: served}) as reader:
        for block in blocks:
            reader.run(block)

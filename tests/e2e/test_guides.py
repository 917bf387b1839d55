"""The guides against a default `temper up`: every block of a page, one after another, as it is written there, and the
answers that the page promises. tests/guides/blocks.py has the comments by which a block is left out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.guides.blocks import Block, pages, read
from tests.guides.reader import Reader
from tests.stack import ROOT, Stack

THOROUGH = tuple(f"docs/guides/{name}.md" for name in ("adapters", "evaluation", "forge"))
"""Pages with many jobs, whose commands test_cli.py and tests/integration run, too."""
PAGES = {str(page.relative_to(ROOT)): [block for block in read(page) if block.runs] for page in pages()}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """What a newcomer has: no settings, no data, the default name."""
    with Stack(tmp_path_factory.mktemp("guides") / "data") as running:
        yield running


@pytest.mark.usefixtures("unattached")
@pytest.mark.parametrize(
    "blocks",
    [
        pytest.param(blocks, id=page, marks=[pytest.mark.thorough] * (page in THOROUGH))
        for page, blocks in PAGES.items()
        if blocks
    ],
)
def test_page_runs_as_written(stack: Stack, blocks: list[Block], tmp_path: Path) -> None:
    with Reader(stack, tmp_path) as reader:
        for block in blocks:
            reader.run(block)

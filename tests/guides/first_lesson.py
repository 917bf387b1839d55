"""The pages of a newcomer's first minutes, each on fresh data: is the taught sentence what is answered?

`python -m tests.guides.first_lesson` runs each page of LESSONS as it is written, in so many fresh data directories (3;
`--directories`), and ends with 1 if any answer was another one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.guides.blocks import read
from tests.guides.reader import NotAsWritten, Reader
from tests.stack import ROOT, Stack

LESSONS = ("README.md", "docs/guides/quickstart.md", "docs/guides/install.md", "docs/tutorials/ci.md")


def taught(page: str, scratch: Path) -> int:
    """Runs a page on a Temper of its own; returns how many promised answers it gave.

    Raises:
        NotAsWritten: it answered something else, or a block failed.
    """
    workshop = scratch / "reader"
    workshop.mkdir(parents=True)
    found = 0
    with Stack(scratch / "data") as stack, Reader(stack, workshop) as reader:
        for block in read(ROOT / page):
            if block.runs:
                reader.run(block)
                found += len(block.answers)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directories", type=int, default=3, help="fresh data directories a page")
    parser.add_argument("pages", nargs="*", default=LESSONS, metavar="PAGE")
    options = parser.parse_args()
    failed = 0
    for page in options.pages:
        for number in range(1, options.directories + 1):
            began = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="first-lesson-") as scratch:
                try:
                    outcome = f"{taught(page, Path(scratch))} answers, each as taught"
                except NotAsWritten as error:
                    failed += 1
                    outcome = f"NOT AS WRITTEN: {error}"
            print(f"{page}  directory {number}  {outcome}  {time.monotonic() - began:.0f} s", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

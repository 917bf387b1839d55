"""What the files of tests cost, so that a run begins with the longest: tests/costs.tsv, which
`make test ARGS=--write-costs` writes anew."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import pytest

TABLE = Path(__file__).with_suffix(".tsv")
UNKNOWN_SECONDS = 1.0
"""Cost of a file that the table does not have yet."""


@cache
def _recorded() -> dict[str, float]:
    lines = (line.split("\t") for line in TABLE.read_text().splitlines())
    return {file: float(seconds) for seconds, file in lines}


def seconds(scope: str, files: frozenset[str]) -> float:
    """Expected cost of a test, a file or a directory of which ``files`` are run."""
    if scope in files:
        return _recorded().get(scope, UNKNOWN_SECONDS)
    inside = [file for file in files if scope.startswith(file + "::")] or [f for f in files if f.startswith(scope)]
    return sum(_recorded().get(file, UNKNOWN_SECONDS) for file in inside)


class Recorder:
    """Plugin of the process that reports: adds up what each file took, and writes the table at the end of a run in
    which all passed. Files that were not run keep their line."""

    def __init__(self) -> None:
        self._took: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._took[report.nodeid.partition("::")[0]] += report.duration  # type: ignore[assignment]

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus != pytest.ExitCode.OK:
            return
        root = TABLE.parents[1]
        table = {file: took for file, took in (_recorded() | self._took).items() if (root / file).exists()}
        ordered = sorted(table.items(), key=lambda line: (-round(line[1], 1), line[0]))
        TABLE.write_text("".join(f"{took:.1f}\t{file}\n" for file, took in ordered if took >= 0.5))

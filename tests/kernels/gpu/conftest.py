"""Triton kernels run for real where there is a GPU and in Triton's interpreter elsewhere (tests/conftest.py).

Interpreted, a case takes up to seconds, and the next one of a large grid takes the same way through a kernel. So there
every value of each parameter is tried, and of three parameters or more every two values together; on a GPU all cases.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kernels.gpu.launch.compiler import prepare_compiler
from tests.kernels.gpu import interpreter  # noqa: F401

HERE = Path(__file__).parent
SMALL = 6
"""Cases up to which a grid is tried as a whole."""

Place = tuple[str, ...]
"""Of a case in its grid: its value of each parameter."""


@pytest.fixture(scope="session")
def device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    prepare_compiler()
    return torch.device("cuda")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves cases of large grids to machines with a GPU."""
    if torch.cuda.is_available():
        return
    grids: dict[str, list[pytest.Function]] = {}
    for item in items:
        if not isinstance(item, pytest.Function) or not item.path.is_relative_to(HERE):
            continue
        if hasattr(item, "callspec") and "device" in item.fixturenames:  # others launch nothing
            grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left = {
        id(cases[at])
        for cases in grids.values()
        for at in set(range(len(cases)))
        - set(_chosen([tuple(map(repr, case.callspec.params.values())) for case in cases]))
    }
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left])
    items[:] = [item for item in items if id(item) not in left]


def _chosen(cases: Sequence[Place]) -> list[int]:
    """Which cases of a grid are tried: few that have all that there is to cover, and each value about as often."""
    columns = list(zip(*cases, strict=True))
    axes = [axis for axis, column in enumerate(columns) if len(set(column)) > 1 and _alike(columns, axis) == axis]
    if len(cases) <= SMALL or len(axes) < 2:
        return list(range(len(cases)))
    together = 2 if len(axes) > 2 else 1
    parts = [
        [tuple((axis, case[axis]) for axis in some) for some in itertools.combinations(axes, together)]
        for case in cases
    ]
    values = [[(axis, case[axis]) for axis in axes] for case in cases]
    missing, used, chosen = set(itertools.chain(*parts)), Counter[tuple[int, str]](), list[int]()
    while missing:
        best = max(
            range(len(cases)),
            key=lambda at: (len(missing & set(parts[at])), -sum(used[value] for value in values[at])),
        )
        missing -= set(parts[best])
        used.update(values[best])
        chosen.append(best)
    return chosen


def _alike(columns: Sequence[Place], axis: int) -> int:
    """The first parameter that changes when this one does, and only then: they are given together."""
    pairs = [set(zip(column, columns[axis], strict=True)) for column in columns]
    counts = [len(set(column)) for column in columns]
    return next(at for at, both in enumerate(pairs) if len(both) == counts[at] == counts[axis])

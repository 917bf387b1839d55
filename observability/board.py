"""Dashboards as data; `render` makes Grafana's JSON of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

Unit: TypeAlias = Literal[
    "short", "none", "s", "bytes", "percentunit", "reqps", "ops", "dateTimeAsIso", "dtdurations", "celsius", "watt"
]
"""Grafana's names."""
Kind: TypeAlias = Literal["graph", "stack", "number", "table"]
Color: TypeAlias = Literal["green", "yellow", "orange", "red", "blue", "text"]
COLUMNS = 24
_HEIGHTS: dict[Kind, int] = {"graph": 8, "stack": 8, "number": 4, "table": 7}


@dataclass(frozen=True, slots=True)
class Query:
    """Query of a panel: one expression."""

    expr: str
    legend: str = ""
    """Grafana's pattern, such as "{{pod}}"."""
    exemplars: bool = False
    """Traces are shown as points; of latencies only."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Panel of a dashboard.

    Raises:
        ValueError: it is not complete, or wider than the dashboard.
    """

    title: str
    description: str
    queries: tuple[Query, ...]
    kind: Kind = "graph"
    unit: Unit = "short"
    width: int = 8
    steps: tuple[tuple[float, Color], ...] = ()
    """(value, colour) steps: from the value on the panel has this colour; green below the first."""
    low: float | None = None
    high: float | None = None
    """Ends of the axis."""
    alerts: tuple[str, ...] = ()
    """Whose runbooks it links."""
    decimals: int | None = None
    base: Color = "green"
    """Below the first step."""

    def __post_init__(self) -> None:
        if not self.title or not self.description or not self.queries:
            raise ValueError(f"panel {self.title!r} needs a title, a description and a query")
        if not 1 <= self.width <= COLUMNS:
            raise ValueError(f"panel {self.title!r}: width {self.width} is not from 1 to {COLUMNS}")
        if list(self.steps) != sorted(self.steps, key=lambda step: step[0]):
            raise ValueError(f"panel {self.title!r}: steps must ascend")

    @property
    def height(self) -> int:
        return _HEIGHTS[self.kind]


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """Dashboard."""

    name: str
    """Name of the file; "temper-{name}" is Grafana's uid."""
    title: str
    description: str
    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        titles = [panel.title for panel in self.panels]
        if len(set(titles)) != len(titles):
            raise ValueError(f"{self.name}: two panels have the same title")

    @property
    def panels(self) -> list[Panel]:
        return [panel for row in self.rows for panel in row.panels]

    @property
    def queries(self) -> list[Query]:
        return [query for panel in self.panels for query in panel.queries]


@dataclass(frozen=True, slots=True)
class Place:
    """Position on the grid of 24 columns."""

    x: int
    y: int
    width: int
    height: int


def arrange(board: Board) -> Iterator[tuple[Row | Panel, Place]]:
    """Rows and panels from the top left, wrapped where a line is full."""
    y = 0
    for row in board.rows:
        yield row, Place(0, y, COLUMNS, 1)
        y += 1
        x = tallest = 0
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y, tallest = 0, y + tallest, 0
            yield panel, Place(x, y, panel.width, panel.height)
            x += panel.width
            tallest = max(tallest, panel.height)
        y += tallest

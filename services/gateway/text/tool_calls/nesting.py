"""Parameter lines within the value of a parameter: how deep they are nested, and where the value may have ended.

A value ends at the `</parameter>` that the template puts behind it, on a line of its own. Such lines of the value
itself are told from the end by counting: `</parameter>` closes what a line `<parameter=...>` has opened. A value that
leaves one open, or whose own end was forgotten, has no end by the count when all text is over; it ended at the best
place before.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value may have ended.

    Args:
        position: of the markup.
        length: of the markup that belongs to the value.
    """

    position: int
    length: int


@dataclass(slots=True)
class Nesting:
    """The lines of one value so far."""

    depth: int = 0
    """Parameters of the value itself that are open."""
    doubt: Place | None = None
    """First place where the value ended if a model has forgotten something."""
    _forgotten: Place | None = None
    """First place outside of all nested parameters where something was forgotten."""
    _ends: dict[int, Place] = field(default_factory=dict)
    """First place that looks like the end in all but the count, by the depth behind it."""

    @property
    def place(self) -> Place | None:
        """Where the value ended, all text having been read."""
        found = [*self._ends.values(), *([] if self._forgotten is None else [self._forgotten])]
        return min(found, key=lambda place: place.position, default=self.doubt)

    def open(self, forgotten: Place | None) -> None:
        """A line opens a parameter; ``forgotten``: the value ended before it, without a tag."""
        self._remember(forgotten)
        self.depth += 1

    def close(self, end: Place | None, forgotten: Place | None) -> None:
        """A line closes a parameter.

        Args:
            end: what follows is what the template puts behind a value.
            forgotten: it is what a model puts there that forgets something.
        """
        if not self.depth and forgotten is not None:
            self._remember(forgotten)
            return
        self.depth = depth = max(0, self.depth - 1)
        lowest = depth if end is None else depth + 1
        # What goes on as text was no end.
        self._ends = {below: place for below, place in self._ends.items() if below < lowest}
        if end is not None:
            self._ends.setdefault(depth, end)
        elif not depth:
            self._forgotten = None

    def _remember(self, forgotten: Place | None) -> None:
        if not self.depth:
            self._forgotten = self._forgotten or forgotten

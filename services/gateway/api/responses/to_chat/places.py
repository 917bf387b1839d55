"""Places in the body of a request, as errors name them."""

from __future__ import annotations

Location = tuple[int | str, ...]


def dotted(location: Location) -> str:
    """A place in a body as errors name it."""
    text = ""
    for segment in location:
        text += f"[{segment}]" if isinstance(segment, int) else f".{segment}" if text else segment
    return text

"""System messages wherever they stand, as the one at the beginning that chat templates take.

Those at the beginning are joined by an empty line. A later one becomes a marked part of the turn it stands in: of the
user's message or the tool's result before it; where an assistant's message is before it, of the one behind it; and
where that is an assistant's, too, or there is none, it is a user's message of its own. So every conversation has the
same tokens in every API and in training, the order of what was said is kept, and what comes later never changes the
tokens of what the model has answered already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_BETWEEN = "\n\n"
_ROLES = ("system", "developer")


def placed(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The turns with one system message at most, the first; the caller's are not touched."""
    first = next((index for index, turn in enumerate(turns) if turn.get("role") not in _ROLES), len(turns))
    leading, rest = turns[:first], turns[first:]
    placed: list[dict[str, Any]] = [{**leading[0], "role": "system"}] if leading else []
    if len(leading) > 1:
        placed[0]["content"] = _joined(map(text_of, leading))
    waiting: list[str] = []
    for turn in rest:
        role = turn.get("role")
        if role in _ROLES:
            _instruct(placed, text_of(turn), waiting)
        elif role == "assistant":
            _speak(placed, waiting)
            placed.append(dict(turn))
        elif waiting:
            placed.append({**turn, "content": _joined([*map(_marked, waiting), text_of(turn)])})
            waiting.clear()
        else:
            placed.append(dict(turn))
    _speak(placed, waiting)
    return placed


def text_of(turn: Mapping[str, Any]) -> str:
    """The text of a turn, whether it is one or comes in parts."""
    content = turn.get("content")
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content or () if isinstance(part, Mapping))


def _marked(text: str) -> str:
    # The mark that coding agents use for this. It is text: a user may write it as well.
    return f"<system-reminder>\n{text}\n</system-reminder>"


def _joined(texts: Iterable[str]) -> str:
    return _BETWEEN.join(text for text in texts if text.strip())


def _instruct(placed: list[dict[str, Any]], text: str, waiting: list[str]) -> None:
    """Puts an instruction behind the message before it, or lets it wait for the one behind it."""
    if not text.strip():
        return
    if placed and placed[-1].get("role") not in ("assistant", "system"):
        placed[-1]["content"] = _joined([text_of(placed[-1]), _marked(text)])
    else:
        waiting.append(text)


def _speak(placed: list[dict[str, Any]], waiting: list[str]) -> None:
    if waiting:
        placed.append({"role": "user", "content": _joined(map(_marked, waiting))})
        waiting.clear()

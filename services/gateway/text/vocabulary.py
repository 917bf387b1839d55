"""What each token id stands for, cached by id."""

from __future__ import annotations

from collections.abc import Mapping

from services.common.text.tokenizer import TextCodec

MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Control tokens that the gateway's parsers read, so they stay visible even if a tokenizer marks them special."""


class Vocabulary:
    """Bytes and text of single tokens.

    Args:
        codec: the model's tokenizer.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._bytes: dict[int, bytes] = {}
        self._visible: dict[int, bytes] = {}
        self.markup: Mapping[str, int] = {
            token: number for token in MARKUP if (number := codec.token_id(token)) is not None
        }
        """Ids of those that are a token of this model."""
        self._hidden = frozenset(codec.special_ids) - frozenset(self.markup.values())

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, also of a special one."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._codec.token_bytes(token_id)
        return known

    def visible_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to the text: none for a special token."""
        known = self._visible.get(token_id)
        if known is None:
            known = self._visible[token_id] = b"" if token_id in self._hidden else self.token_bytes(token_id)
        return known

    def is_text(self, token_id: int) -> bool:
        """Whether a token adds to the text, be it markup; control tokens do not."""
        return bool(self.visible_bytes(token_id))

    def token_text(self, token_id: int) -> str:
        """A token on its own, for logprobs; bytes that are not UTF-8 become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def text(self, token_ids: list[int]) -> str:
        """Visible text of some tokens."""
        return b"".join(map(self.visible_bytes, token_ids)).decode("utf-8", "replace")

"""The shapes of OpenAI's responses that chat and text completions share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.gateway.inference.prompt_logprobs import TokenLogprob
from services.gateway.text.detokenizer import Piece
from services.gateway.text.vocabulary import Vocabulary

_LOWEST = -9999.0  # JSON has no -inf; the value that OpenAI's API reports for it


def _finite(logprob: float) -> float:
    return logprob if logprob > _LOWEST else _LOWEST


def _named(vocabulary: Vocabulary, token_id: int, logprob: float) -> dict[str, Any]:
    raw = vocabulary.token_bytes(token_id)
    return {"token": vocabulary.token_text(token_id), "logprob": _finite(logprob), "bytes": list(raw)}


def chat_logprobs(vocabulary: Vocabulary, entries: Sequence[TokenLogprob], top: int) -> list[dict[str, Any]]:
    """`logprobs.content` of a chat choice."""
    return [
        {
            **_named(vocabulary, entry.token_id, entry.logprob),
            "top_logprobs": [
                _named(vocabulary, token_id, logprob)
                for token_id, logprob in zip(entry.top_ids[:top], entry.top_logprobs[:top], strict=True)
            ],
        }
        for entry in entries
    ]


def text_logprobs(vocabulary: Vocabulary, piece: Piece, top: int) -> dict[str, Any]:
    """`logprobs` of a text choice; the sampled token is always among its alternatives."""
    entries: list[TokenLogprob] = piece.entries
    return {
        "tokens": [vocabulary.token_text(entry.token_id) for entry in entries],
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [_alternatives(vocabulary, entry, top) for entry in entries] if top else None,
        "text_offset": list(piece.offsets),
    }


def _alternatives(vocabulary: Vocabulary, entry: TokenLogprob, top: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for token_id, logprob in zip(entry.top_ids[:top], entry.top_logprobs[:top], strict=True):
        found.setdefault(vocabulary.token_text(token_id), _finite(logprob))
    found.setdefault(vocabulary.token_text(entry.token_id), _finite(entry.logprob))
    return found

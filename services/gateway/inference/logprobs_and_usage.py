"""The shapes of OpenAI's responses that chat and text completions share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.gateway.inference.choice import Choice, TokenLogprob
from services.gateway.text.detokenizer import Piece
from services.gateway.text.vocabulary import Vocabulary

_LOWEST = -9999.0  # JSON has no -inf; the value that OpenAI's API reports for it


def _finite(logprob: float) -> float:
    return logprob if logprob > _LOWEST else _LOWEST


def usage(choices: Sequence[Choice], *, choices_per_prompt: int) -> dict[str, Any]:
    """Token counts. A prompt counts once, however many choices it has. With a `session_id` also where it is."""
    firsts = choices[::choices_per_prompt]
    prompt = sum(choice.prompt_tokens for choice in firsts)
    completion = sum(choice.tokens for choice in choices)
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in firsts)},
        "completion_tokens_details": {"reasoning_tokens": sum(choice.reasoning_tokens for choice in choices)},
    }
    if choices[0].session is not None:
        counts["session"] = choices[0].session
    return counts


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

"""Log-probabilities of prompts and of answers, in the forms that clients know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.common.errors import InvalidRequest, Unavailable
from services.common.pb import engine_pb2
from services.gateway.text.detokenizer import Piece, TextAssembler, Vocabulary


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A sampled token with the alternatives to it, natural logarithms."""

    token_id: int
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(slots=True)
class PromptLogprobs:
    """Log-probabilities of consecutive tokens of one prompt, as they come in."""

    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    """1: no other token was likelier."""
    _top_ids: list[int] = field(default_factory=list)
    _top_logprobs: list[float] = field(default_factory=list)

    def add(self, message: engine_pb2.PromptLogprobs) -> None:
        """Takes the next tokens."""
        self.logprobs += message.logprobs
        self.ranks += message.ranks
        self._top_ids += message.top_token_ids
        self._top_logprobs += message.top_logprobs

    def top_ids(self, place: int) -> list[int]:
        """The likeliest tokens in the place of one of these, most likely first."""
        return self._part(self._top_ids, place)

    def top_logprobs(self, place: int) -> list[float]:
        """Theirs."""
        return self._part(self._top_logprobs, place)

    def _part(self, values: list[Any], place: int) -> list[Any]:
        width = len(values) // len(self.logprobs)
        return values[place * width : (place + 1) * width]


def check_size(tokens: int, alternatives: int, *, limit: int, field: str) -> None:
    """Refuses an answer that would be too large.

    Args:
        tokens: of all prompts, as often as they are reported.
        alternatives: asked for beside each.
        limit: TEMPER_MAX_PROMPT_LOGPROBS.
        field: of the request, to be named.

    Raises:
        InvalidRequest: it would.
    """
    wanted = tokens * (1 + alternatives)
    if wanted > limit:
        raise InvalidRequest(
            f"{tokens} prompt tokens with {alternatives} alternatives each are {wanted} log-probabilities and a "
            f"request may ask for {limit}: send fewer or shorter prompts, or ask for fewer alternatives",
            param=field,
        )


def check_complete(scores: PromptLogprobs, wanted: int) -> None:
    """Raises Unavailable if the engine has begun to answer and has not said all of the prompt."""
    if len(scores.logprobs) != wanted:
        raise Unavailable(f"the engine told {len(scores.logprobs)} of {wanted} log-probabilities of the prompt")


def by_token(
    vocabulary: Vocabulary, prompt: Sequence[int], scores: PromptLogprobs, top: int
) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` as vLLM answers: null for the first token, then token id → log-probability, rank and text of
    ``top`` alternatives and of the prompt's own token."""
    answer: list[dict[str, Any] | None] = [None]
    for place, token_id in enumerate(prompt[1 : len(scores.logprobs) + 1]):
        ids, logprobs = scores.top_ids(place)[:top], scores.top_logprobs(place)[:top]
        ranked = {
            str(other): _ranked(vocabulary, other, logprob, rank)
            for rank, (other, logprob) in enumerate(zip(ids, logprobs, strict=True), 1)
        }
        own = _ranked(vocabulary, token_id, scores.logprobs[place], scores.ranks[place])
        answer.append({**ranked, str(token_id): own})
    return answer


def _ranked(vocabulary: Vocabulary, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": vocabulary.token_text(token_id)}


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt at the beginning of a completion."""

    text: str
    logprobs: dict[str, Any] | None
    """`logprobs` of a text choice, for the prompt's tokens alone: null for the first one."""


NO_ECHO = Echo("", None)


def joined(before: dict[str, Any] | None, own: dict[str, Any]) -> dict[str, Any]:
    """`logprobs` of a prompt and of what follows it."""
    if before is None:
        return own
    return {name: None if part is None else before[name] + part for name, part in own.items()}


def echo(vocabulary: Vocabulary, prompt: Sequence[int], scores: PromptLogprobs | None, top: int) -> Echo:
    """The prompt as text, its tokens and their places in it.

    Args:
        scores: of all tokens but the first; None: nobody asked for them.
        top: alternatives a token.
    """
    assembler = TextAssembler(vocabulary)
    for place, token_id in enumerate(prompt):
        assembler.push(token_id, place)
    piece = assembler.take(final=True)
    if scores is None:
        return Echo(piece.text, None)
    tops: list[dict[str, float] | None] = [None]
    for place, token_id in enumerate(prompt[1:]):
        found: dict[str, float] = {}
        for other, logprob in zip(scores.top_ids(place)[:top], scores.top_logprobs(place)[:top], strict=True):
            found.setdefault(vocabulary.token_text(other), logprob)
        found.setdefault(vocabulary.token_text(token_id), scores.logprobs[place])
        tops.append(found)
    return Echo(
        piece.text,
        {
            "tokens": [vocabulary.token_text(token_id) for token_id in prompt],
            "token_logprobs": [None, *scores.logprobs],
            "top_logprobs": tops if top else None,
            "text_offset": list(piece.offsets),
        },
    )


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


def text_logprobs(vocabulary: Vocabulary, piece: Piece, top: int, *, itself: bool = False) -> dict[str, Any]:
    """`logprobs` of a text choice; the sampled token is always among its alternatives.

    Args:
        itself: whether it is that as the only one, too.
    """
    entries: list[TokenLogprob] = piece.entries
    return {
        "tokens": [vocabulary.token_text(entry.token_id) for entry in entries],
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [_alternatives(vocabulary, entry, top) for entry in entries] if top or itself else None,
        "text_offset": list(piece.offsets),
    }


def _alternatives(vocabulary: Vocabulary, entry: TokenLogprob, top: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for token_id, logprob in zip(entry.top_ids[:top], entry.top_logprobs[:top], strict=True):
        found.setdefault(vocabulary.token_text(token_id), _finite(logprob))
    found.setdefault(vocabulary.token_text(entry.token_id), _finite(entry.logprob))
    return found

"""Trajectories become documents: the tokens as they were sampled and read, with the loss on the actions only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from services.common.errors import InvalidRequest
from services.common.jobs.documents import Document
from services.common.jobs.fields.messages import as_turns
from services.common.jobs.trajectories.segments import Action, Observation, Trajectory

if TYPE_CHECKING:
    from services.common.text.tokenizer import TextCodec

_EXCHANGE: Sequence[Mapping[str, Any]] = ({"role": "user", "content": "x"}, {"role": "assistant", "content": "y"})
"""What an observation of messages is rendered behind: nothing of it is kept."""


@dataclass(frozen=True, slots=True)
class Turn:
    """An action in a document."""

    action: Action
    number: int
    """Among the actions of its trajectory."""
    begin: int
    """Place of its first token in the document."""

    @property
    def end(self) -> int:
        return self.begin + len(self.action.token_ids)


@dataclass(frozen=True, slots=True)
class TrajectoryDocument:
    """One sequence of a trajectory, and its turns in order: the trained tokens are exactly theirs."""

    document: Document
    turns: Sequence[Turn]


@dataclass(slots=True)
class _Sequence:
    tokens: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)


def trajectory_documents(
    codec: TextCodec,
    trajectory: Trajectory,
    source: int,
    *,
    prompt: Sequence[int] = (),
    options: Mapping[str, Any] | None = None,
) -> list[TrajectoryDocument]:
    """The sequences of a trajectory: one, or one from each place on where its context begins anew.

    Args:
        prompt: tokens in front of the first segment; none for a trajectory that begins by itself.
        options: of the chat template, for observations of messages.

    Raises:
        InvalidRequest: it has no beginning, or two, nothing is learnt in a sequence, or the template refuses messages.
    """
    if bool(prompt) == trajectory.begins_by_itself:
        raise InvalidRequest(
            "segments[0] is an observation, and the prompt is given beside it: leave one of them out"
            if prompt
            else "segments[0] is an action, and there is no prompt: give one, or begin with an observation",
            param="segments",
        )
    sequences = [_Sequence(list(prompt))]
    number = 0
    for index, segment in enumerate(trajectory.segments):
        current = sequences[-1]
        if isinstance(segment, Action):
            current.turns.append(Turn(segment, number, len(current.tokens)))
            current.tokens += segment.token_ids
            number += 1
            continue
        if segment.restarts and current.tokens:
            if not current.turns:
                raise InvalidRequest(
                    f"segments[{index}] restarts a context in which nothing was done", param="segments"
                )
            sequences.append(current := _Sequence())
        current.tokens += observation_tokens(codec, segment, after=current.tokens, options=options or {})
    return [_document(sequence, source) for sequence in sequences]


def observation_tokens(
    codec: TextCodec, observation: Observation, *, after: Sequence[int], options: Mapping[str, Any]
) -> list[int]:
    """Tokens of an observation behind those of the trajectory so far; with none before it, of a prompt.

    Raises:
        InvalidRequest: the template refuses the messages, or there are no tokens.
    """
    if observation.token_ids is not None:
        return observation.token_ids
    if observation.text is not None:
        tokens = codec.encode_plain(observation.text)
    else:
        messages = as_turns(observation.messages or ())
        tokens = _continuation(codec, messages, after, options) if after else codec.encode_chat(messages, **options)
    if not tokens:
        raise InvalidRequest("an observation has no tokens", param="segments")
    return tokens


def _continuation(
    codec: TextCodec, messages: Sequence[Mapping[str, Any]], after: Sequence[int], options: Mapping[str, Any]
) -> list[int]:
    """What the template writes behind the token that ended the assistant's turn: an assistant's turn that other turns
    follow may be rendered differently, so the place is found by counting turns, not by what is in them."""
    end = codec.eos_ids[0]
    turns = codec.encode_chat(_EXCHANGE, add_generation_prompt=False, **options).count(end)
    whole = codec.encode_chat([*_EXCHANGE, *messages], **options)
    places = [place for place, token in enumerate(whole) if token == end]
    if not turns or len(places) <= turns:
        raise InvalidRequest(
            "the chat template does not end turns with the eos token: give token_ids of the observation",
            param="segments",
        )
    cut_off = after[-1] not in codec.eos_ids
    return whole[places[turns - 1] + (0 if cut_off else 1) :]


def _document(sequence: _Sequence, source: int) -> TrajectoryDocument:
    trained = [False] * len(sequence.tokens)
    for turn in sequence.turns:
        trained[turn.begin : turn.end] = [True] * len(turn.action.token_ids)
    first = sequence.turns[0].begin
    observed = [place > first and not flag for place, flag in enumerate(trained)]
    document = Document(
        tuple(sequence.tokens), tuple(trained), source, observed=tuple(observed) if any(observed) else None
    )
    return TrajectoryDocument(document, tuple(sequence.turns))

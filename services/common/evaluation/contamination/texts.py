"""What a model reads of an item or of a training document: turns, and which of them are a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from services.common.evaluation.suites.spec import SuiteItem
from services.common.jobs.fields.messages import Message, as_turns
from services.common.jobs.fields.prompts import PromptFields
from services.common.jobs.kinds.dpo import DpoJob
from services.common.jobs.kinds.draft import DraftJob
from services.common.jobs.kinds.grpo import GrpoJob
from services.common.jobs.kinds.kto import KtoJob
from services.common.jobs.kinds.merge import MergeJob
from services.common.jobs.kinds.opd import OpdJob
from services.common.jobs.kinds.rollouts import GrpoGroup
from services.common.jobs.kinds.sft import SftExample, SftJob
from services.common.jobs.trajectories.segments import Trajectory

if TYPE_CHECKING:
    from services.common.jobs.registry import PublishingSpec
    from services.common.text.tokenizer import TextCodec

_ANSWERS = "assistant"


class Turn(NamedTuple):
    """One turn's text."""

    role: str
    """Empty: of a text without turns."""
    text: str

    @property
    def is_system(self) -> bool:
        return self.role in ("system", "developer")


@dataclass(frozen=True, slots=True)
class ReadText:
    """A conversation or a text as it is read from its start, and texts that are read behind one of its prompts."""

    turns: tuple[Turn, ...]
    prompts: tuple[int, ...]
    """Numbers of leading turns after which something is answered: each such beginning is a prompt."""
    others: tuple[str, ...] = ()

    @classmethod
    def answered(cls, asked: Sequence[Turn], answers: Sequence[str]) -> ReadText:
        """A prompt with its answers."""
        first = tuple(Turn(_ANSWERS, answer) for answer in answers[:1])
        return cls((*asked, *first), (len(asked),), tuple(answers[1:]))


def item_text(item: SuiteItem) -> ReadText:
    """An item of a suite: its prompt, its right answers and its choices."""
    return ReadText.answered(_turns(item.asked), [*(item.expected or ()), *(item.choices or ())])


def training_texts(spec: PublishingSpec, codec: TextCodec) -> Iterator[ReadText]:
    """All that a job learns from and that is known before it runs; what it holds out is not among it. Of a job that
    samples, those are its prompts with their references.

    Args:
        codec: of the model, for what was given as token ids.

    Raises:
        TypeError: this release cannot tell for this kind of job.
    """
    if isinstance(spec, DraftJob):
        return  # a drafter changes no answer
    if isinstance(spec, SftJob):
        yield from (_sft(example, codec) for _, example in spec.split[0])
    elif isinstance(spec, DpoJob):
        for _, pair in spec.split[0]:
            yield ReadText.answered(_turns(pair.asked), (pair.chosen, pair.rejected))
    elif isinstance(spec, KtoJob):
        for _, judged in spec.split[0]:
            yield ReadText.answered(_turns(judged.asked), (judged.completion,))
    elif isinstance(spec, OpdJob):
        for prompt in spec.prompts:
            completion = prompt.completion
            if prompt.completion_token_ids is not None:
                completion = codec.decode(prompt.completion_token_ids)
            yield ReadText.answered(_asked(prompt, codec), () if completion is None else (completion,))
    elif isinstance(spec, GrpoJob):
        for asked in spec.generate.prompts if spec.generate is not None else ():
            yield ReadText.answered(_asked(asked, codec), () if asked.answer is None else (asked.answer,))
        for group in spec.scored_groups:
            yield from _rollouts(group, codec)
    elif not isinstance(spec, MergeJob):
        raise TypeError(f"what a job of kind {spec.kind} learns from is not known")


def _sft(example: SftExample, codec: TextCodec) -> ReadText:
    if isinstance(example.trajectory, Trajectory):
        return _played(example.trajectory, (), codec)
    if example.text is not None:
        return ReadText((Turn("", example.text),), (1,))
    if example.messages is None:
        return ReadText.answered(_turns(example.prompt or ""), (example.completion or "",))
    taught = (index for index, message in enumerate(example.messages) if message.taught)
    return ReadText(_turns(example.messages), tuple(taught))


def _rollouts(group: GrpoGroup, codec: TextCodec) -> Iterator[ReadText]:
    if group.trajectories is None:
        answers = [
            codec.decode(one.token_ids) if one.token_ids is not None else one.text or "" for one in group.completions
        ]
        yield ReadText.answered(_asked(group, codec), answers)
        return
    asked = _asked(group, codec) if group.has_prompt else ()
    yield from (_played(trajectory, asked, codec) for trajectory in group.played)


def _played(trajectory: Trajectory, asked: Sequence[Turn], codec: TextCodec) -> ReadText:
    turns = list(asked)
    learnt = []
    for segment in trajectory.segments:
        if segment.type == "observation" and segment.messages is not None:
            turns += _turns(segment.messages)
            continue
        if segment.type == "action":
            learnt.append(len(turns))
        text = segment.text if segment.type == "observation" else None
        turns.append(Turn("", codec.decode(segment.token_ids or ()) if text is None else text))
    return ReadText(tuple(turns), tuple(learnt))


def _turns(asked: str | Sequence[Message]) -> tuple[Turn, ...]:
    return tuple(Turn(turn["role"], turn["content"]) for turn in as_turns(asked))


def _asked(prompt: PromptFields, codec: TextCodec) -> tuple[Turn, ...]:
    if prompt.prompt_token_ids is not None:
        return _rendered(prompt.prompt_token_ids, codec)
    return _turns((prompt.messages or []) if prompt.prompt is None else prompt.prompt)


def _rendered(tokens: Sequence[int], codec: TextCodec) -> tuple[Turn, ...]:
    """Turns of a prompt as tokens: a chat is cut where its turns begin, and named by the line that follows. The turn
    at its end that waits for the assistant is left out."""
    starts = [place for place, token in enumerate(tokens) if token == codec.turn_start_id]
    if not starts:
        return (Turn("", codec.decode(tokens)),)
    turns = []
    for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
        role, _, text = codec.decode(tokens[start:end]).partition("\n")
        turns.append(Turn(role.strip(), text.strip()))
    return tuple(turns[:-1] if turns[-1].role == _ANSWERS else turns)

"""Questions: the items of a suite as they are asked, with the suite's answered examples in front of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.common.errors import InvalidRequest
from services.common.evaluation.suites.spec import SuiteItem, SuiteSettings
from services.common.jobs.fields.messages import as_turns
from services.common.jobs.scorers.of_suites.likelihood import ChoiceSpec, PerplexitySpec
from services.common.text.tokenizer import TextCodec


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt: a conversation, or a text that is used as it is."""

    asked: str
    """Text of its last turn."""
    turns: tuple[Mapping[str, Any], ...] = ()
    text: str | None = None
    """The whole prompt, if it is a text; then there are no turns."""
    tools: Sequence[Mapping[str, Any]] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def tokens(self, codec: TextCodec) -> tuple[int, ...]:
        """Token ids exactly as the gateway sends them to an engine. Raises InvalidRequest: the template refuses it."""
        if self.text is not None:
            return tuple(codec.encode(self.text))
        return tuple(codec.encode_chat(self.turns, tools=self.tools or None, **self.template_kwargs))

    def continuation(self, codec: TextCodec, text: str) -> tuple[int, ...]:
        """Tokens of a text behind the prompt, as /v1/score takes them. Raises InvalidRequest: there are none."""
        tokens = codec.encode(text) if self.text is not None else codec.encode_completion(text)
        if not tokens:
            raise InvalidRequest(f"{text[:40]!r} has no tokens")
        return tuple(tokens)


def question_of(settings: SuiteSettings, item: SuiteItem) -> Question:
    """An item as it is asked. Raw prompts have their examples in front of them with an empty line behind each."""
    asked = item.asked
    if isinstance(asked, str) and settings.prompt_format == "raw" and _are_texts(settings):
        shown = _shown(settings, item, asked)
        shots = "".join(f"{shot.prompt}{shot.completion}\n\n" for shot in settings.few_shot)
        return Question(shown, text=shots + shown)
    turns: list[Mapping[str, Any]] = []
    for shot in settings.few_shot:
        turns += [*as_turns(shot.prompt), {"role": "assistant", "content": shot.completion}]
    *before, last = as_turns(asked)
    shown = _shown(settings, item, str(last["content"]))
    turns += [*before, {**last, "content": shown}]
    return Question(shown, tuple(turns), tools=item.tools or (), template_kwargs=settings.chat_template_kwargs)


def _are_texts(settings: SuiteSettings) -> bool:
    return all(isinstance(shot.prompt, str) for shot in settings.few_shot)


def _shown(settings: SuiteSettings, item: SuiteItem, prompt: str) -> str:
    scorer = settings.scorer
    return scorer.shown(prompt, item.reference) if isinstance(scorer, ChoiceSpec | PerplexitySpec) else prompt

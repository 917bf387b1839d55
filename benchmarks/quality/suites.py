"""Suites of the tiny model's skills, answered in this process by a checkpoint, and graded by Temper's own code."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.tiny.recipe.suites import SUITES
from services.common.evaluation.suites.lines import read_suite
from services.common.evaluation.suites.spec import SuiteItem, SuiteSettings
from services.common.jobs.scorers.grants import Grants
from services.common.text.tokenizer import TextCodec
from services.engine.models.interface import CausalLM
from services.engine.models.registry import load_model
from services.forge.recovery.sampling import OfflineSampler
from services.trainer.evaluation.questions import question_of
from services.trainer.evaluation.scoring import SuiteGrader
from services.trainer.evaluation.targets import Asked, EngineTarget
from services.trainer.host.rollouts import Completion, RolloutRequest

_TOKENS_AT_ONCE = {"cpu": 8192, "cuda": 65536}
"""Of prompts and answers: a GPU answers a whole suite in the time of one item."""


@dataclass(frozen=True, slots=True)
class Suite:
    """A suite that is shipped with the tiny model."""

    name: str
    settings: SuiteSettings
    items: Sequence[SuiteItem]

    @classmethod
    def shipped(cls, items: int | None = None) -> list[Suite]:
        """All suites.

        Args:
            items: of each, the first ones; None: all.
        """
        found = []
        for file in sorted(SUITES.glob("*.json")):
            settings = SuiteSettings.model_validate_json(file.read_bytes())
            read = read_suite(file.with_suffix(".jsonl").read_text(encoding="utf-8"), settings)
            found.append(cls(file.stem, settings, read[:items]))
        return found


def scores(directory: Path, suites: Sequence[Suite], *, device: str = "cpu") -> dict[str, list[float]]:
    """Suite → score of each of its items, answered greedily in float32."""
    codec = TextCodec.from_directory(directory)
    model = load_model(directory, dtype="float32", device=device)
    found = {}
    for suite in suites:
        rollouts: Any = _Offline(model, codec.eos_ids)
        target = EngineTarget(rollouts, codec, None)
        asked = [Asked(question_of(suite.settings, item), 0) for item in suite.items]
        said = target.answer(asked, suite.settings.sampling, lambda: None)
        grader = SuiteGrader(suite.settings, suite.settings.sampling, Grants(), suite.name)
        graded = grader.graded(0, suite.items, [[one] for one in said], lambda: None)
        found[suite.name] = [result.score for result in graded]
    return found


class _Offline:
    """The part of a RolloutSource that greedy answers take."""

    def __init__(self, model: CausalLM, ends: Sequence[int]) -> None:
        self._model, self._ends = model, ends

    def check(self, prompt_tokens: int, max_tokens: int) -> None:
        """Everything fits."""

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        sampling: Any,
        policy: Any,
        *,
        interrupt: Callable[[], None] = lambda: None,
        deadline: float | None = None,
        gentle: bool = False,
    ) -> list[Completion]:
        """See RolloutSource."""
        del policy, interrupt, deadline, gentle
        if sampling.temperature != 0:
            raise ValueError("only greedy answers are sampled here")
        sampler = OfflineSampler(
            self._model,
            ends=self._ends,
            max_new_tokens=sampling.max_tokens,
            temperature=0.0,
            tokens_at_once=_TOKENS_AT_ONCE[self._model.device.type],
        )
        order = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt))
        completions = sampler.sample([requests[index].prompt for index in order])
        found = dict(zip(order, completions, strict=True))
        ended = frozenset(self._ends)
        return [
            Completion(
                tuple(found[index]), array("f", [0.0] * len(found[index])), truncated=found[index][-1] not in ended
            )
            for index in range(len(requests))
        ]

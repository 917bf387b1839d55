"""The engine beside the trainer as the judge of answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.common.adapters.composition import Published
from services.common.errors import InvalidRequest
from services.common.jobs.scorers.grants import JudgeQuestion, JudgeReply
from services.common.text.tokenizer import TextCodec
from services.trainer.evaluation.questions import Question
from services.trainer.host.rollouts import RolloutSource, ScoreRequest


class EngineJudge:
    """Judge by log-likelihoods of the engine. Implements services.common.jobs.scorers.grants.AskJudge."""

    def __init__(self, rollouts: RolloutSource, codec: TextCodec) -> None:
        self._rollouts = rollouts
        self._codec = codec

    def __call__(
        self, judge: Published | None, questions: Sequence[JudgeQuestion], interrupt: Callable[[], None]
    ) -> list[JudgeReply]:
        requests: list[ScoreRequest] = []
        refused: dict[int, str] = {}
        for place, question in enumerate(questions):
            try:
                requests += self._requests(question)
            except InvalidRequest as error:
                refused[place] = error.message
        found = iter(self._rollouts.likelihoods(requests, judge, interrupt=interrupt) if requests else ())
        return [
            JudgeReply({}, refused[place])
            if place in refused
            else JudgeReply({verdict: next(found) for verdict in question.verdicts})
            for place, question in enumerate(questions)
        ]

    def _requests(self, question: JudgeQuestion) -> list[ScoreRequest]:
        asked = Question(question.prompt, ({"role": "user", "content": question.prompt},))
        prompt = asked.tokens(self._codec)
        found = []
        for verdict in question.verdicts:
            tokens = asked.continuation(self._codec, verdict)
            self._rollouts.check(len(prompt) + len(tokens), 1)
            found.append(ScoreRequest(prompt, tokens, 1.0))
        return found

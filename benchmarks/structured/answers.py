"""Answers of the tiny model under drawn schemas, against another validator: `python -m benchmarks.structured.answers`.

For every schema the engine's loop samples some answers at a high temperature, under the masks of its grammar. Each that
ends by itself must be valid for jsonschema_rs, which shares no code with ours. Values near an answer are tried too: a
text that the grammar takes must be valid (of those that are valid some are not generated: that is counted). A schema
may be refused, before anything is generated; a request that fails afterwards counts as a fault.

    --schemas 5000 --answers 5

One JSON line; the exit status is 1 if something did not hold. `tests/unit/benchmarks/structured/test_answers.py` does
some.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.lib.in_process import InProcessEngine, only_warnings, settings_for
from benchmarks.structured.drawn_schemas import Schema
from benchmarks.structured.judge import Judge, Outcome
from services.engine.constraints.grammars import CompiledGrammar
from services.engine.requests.adapter import AdapterChoice
from services.engine.requests.outputs import SequenceUpdate
from services.engine.requests.request import FinishReason
from services.engine.requests.sampling_params import SamplingParams
from services.engine.requests.submission import Submission

TINY = Path(__file__).parents[2] / "models" / "tiny"
_PROMPT = "Give me JSON."
_MAX_TOKENS = 120
_AT_ONCE = 64
_SHOWN = 200
"""Schemas after which the figures so far go to standard error."""


@dataclass(slots=True)
class _Asked:
    schema: Schema
    grammar: CompiledGrammar
    tokens: list[int] = field(default_factory=list)


class Campaign:
    """One engine, and what its answers were.

    Args:
        model: directory of the checkpoint.
        seed: of everything that is drawn.
        answers: of each schema.
        temperature: of the answers.
    """

    def __init__(self, model: Path = TINY, *, seed: int = 0, answers: int = 5, temperature: float = 1.5) -> None:
        self._answers = answers
        self._temperature = temperature
        self._engine = InProcessEngine(
            settings_for(
                model, "cpu", max_num_seqs=_AT_ONCE, token_budget=2048, num_blocks=2049, max_model_len=256,
                torch_threads=1,
            )
        )  # fmt: skip
        codec = self._engine.engine.codec
        self._judge = Judge(codec, self._engine.engine.constraints.vocabulary, seed)
        self._prompt = tuple(codec.encode_plain(_PROMPT))
        self._running: dict[str, _Asked] = {}
        self._ended: queue.Queue[SequenceUpdate] = queue.Queue()

    def stop(self) -> None:
        """Ends the engine."""
        self._engine.stop()

    def run(self, schemas: int) -> Outcome:
        """Draws until so many schemas more are accepted; answers under the next ones run beside those of the last."""
        for _ in range(schemas):
            schema, constraint, grammar = self._judge.next_schema()
            for number in range(self._answers):
                sampling = SamplingParams(
                    temperature=self._temperature, max_tokens=_MAX_TOKENS, seed=number, constraint=constraint
                )
                name = f"{self._judge.outcome.schemas}-{number}"
                self._running[name] = _Asked(schema, grammar)
                submission = Submission(
                    name, self._prompt, sampling, AdapterChoice(), matcher=grammar.matcher(sampling)
                )
                self._engine.engine.loop.submit(submission, self._take)
            while len(self._running) >= 2 * _AT_ONCE:
                self._end(self._ended.get())
        while self._running:
            self._end(self._ended.get())
        return self._judge.outcome

    def _take(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            if update.token is not None:
                self._running[update.request_id].tokens.append(update.token.token_id)
            if update.finish_reason is not None:
                self._ended.put(update)

    def _end(self, update: SequenceUpdate) -> None:
        asked = self._running.pop(update.request_id)
        if update.finish_reason is FinishReason.STOP:
            self._judge.answer(asked.schema, asked.grammar, asked.tokens)
        elif update.finish_reason is FinishReason.LENGTH:
            self._judge.outcome.cut += 1
        else:
            self._judge.failed(asked.schema, update.error)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--schemas", type=int, default=300)
    parser.add_argument("--answers", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=1.5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    only_warnings()
    campaign = Campaign(seed=options.seed, answers=options.answers, temperature=options.temperature)
    try:
        outcome = campaign.run(0)
        while outcome.schemas < options.schemas:
            outcome = campaign.run(min(_SHOWN, options.schemas - outcome.schemas))
            print(json.dumps(outcome.summary()), file=sys.stderr, flush=True)
    finally:
        campaign.stop()
    for problem in outcome.problems[:20]:
        print(problem, file=sys.stderr)
    for reason, count in outcome.reasons.most_common(25):
        print(f"{count} refused: {reason}", file=sys.stderr)
    print(json.dumps({"benchmark": "schema_answers", "seed": options.seed, **outcome.summary()}))
    sys.exit(bool(outcome.problems))


if __name__ == "__main__":
    main()

"""Stops in a chat: whatever the tokens and updates, they end what a client sees of the answer, and nothing else."""

from __future__ import annotations

import random
from typing import Any

import pytest

from services.common.pb import engine_pb2
from services.common.text.output_parser import ChatParser
from services.common.text.stops import Stops
from services.gateway.inference.choice import Choice, Step
from services.gateway.text.detokenizer import TextAssembler
from tests.unit.gateway.drawn_answers import TOOLS, Drawn, Vocabulary, collect, draw, expected

DRAWN = 300
END = 10**6


class _NoMetrics:
    """Observes nothing."""

    ttft = itl = property(lambda self: self)

    def observe(self, *_: Any) -> None:
        pass


def answered(drawn: Drawn, sizes: list[int]) -> list[Step]:
    """The steps of an answer whose updates have so many tokens."""
    stops = Stops(drawn.stops, token_ids=drawn.stop_tokens, min_tokens=drawn.min_tokens) or None
    parser = ChatParser(thinking=True, tools=TOOLS, stops=stops)
    assembler = TextAssembler(Vocabulary(drawn.tokens))  # type: ignore[arg-type]
    choice = Choice(0, "c", 1, assembler, parser, frozenset({END}), stops=stops)
    tokens, steps = [*range(len(drawn.tokens)), END], []
    while tokens:
        size = sizes[len(steps) % len(sizes)]
        part, tokens = tokens[:size], tokens[size:]
        update = engine_pb2.Update(request_id="c", token_ids=part, sampling_logprobs=[-float(token) for token in part])
        update.logprobs.extend(-float(token) for token in part)
        if not tokens:
            update.finish_reason = engine_pb2.FINISH_REASON_STOP
        steps.append(choice.take(update, _NoMetrics()))  # type: ignore[arg-type]
        if choice.finished:
            assert choice.tokens == sum(len(step.token_ids) for step in steps)
            assert choice.broken == (steps[-1].finish_reason == "stop" and parser.calls > 0)
            return steps
    raise AssertionError("the answer did not end")


@pytest.mark.parametrize("sizes", [[1], [3], [10**6], [1, 7, 2]])
def test_drawn_answers(sizes: list[int]) -> None:
    source = random.Random(26)
    stopped = broken = 0
    for number in range(DRAWN):
        drawn = draw(source)
        right, steps = expected(drawn), answered(drawn, sizes)
        found = collect(steps)
        assert found == right, (number, drawn)
        ids = [token for step in steps for token in step.token_ids]
        assert ids == [*range(len(drawn.tokens)), END][: right.tokens]
        assert [logprob for step in steps for logprob in step.sampling_logprobs] == [-float(token) for token in ids]
        entries = [entry.token_id for step in steps for entry in step.piece.entries]
        assert entries == ids[: len(entries)], "of the tokens before the stop"
        assert drawn.text.startswith("".join(step.piece.text for step in steps))
        stopped += right.tokens <= len(drawn.tokens)
        broken += bool(right.calls) and right.reason == "stop"
    assert stopped > DRAWN // 3
    assert broken > DRAWN // 10

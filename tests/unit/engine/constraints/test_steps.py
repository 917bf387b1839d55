"""Constrained requests through scheduler and pipeline: every output is of its language, however steps overlap."""

from __future__ import annotations

import json
import re
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jsonschema_rs
import pytest

from services.engine.loop.step_pipeline import StepPipeline
from services.engine.observability.events import EngineEvent, EventStream, StepDone
from services.engine.requests.outputs import SampledToken, SequenceUpdate
from services.engine.requests.request import FinishReason, Request
from services.engine.requests.sampling_params import Thinking
from services.engine.scheduler.config import SchedulerConfig
from services.engine.scheduler.step_plan import StepPlan
from tests.unit.engine.constraints.support import RandomRunner, codec, constraint, request, schema, text_of

EOS = 2041
THINK_END = 2047
SCHEMAS: list[dict[str, Any]] = [
    {"type": "array", "items": {"enum": ["a", "bb", 3]}, "maxItems": 4},
    {
        "type": "object",
        "properties": {"kind": {"const": "x"}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["kind"],
        "additionalProperties": False,
    },
]


class Bench:
    """A pipeline over a runner that draws at random, and what came of each request."""

    def __init__(self, depth: int, runner: type[RandomRunner] = RandomRunner, **changes: Any) -> None:
        defaults = {
            "max_num_seqs": 4, "token_budget": 64, "block_size": 4, "num_blocks": 256, "num_slots": 12,
            "max_model_len": 256,
        }  # fmt: skip
        config = SchedulerConfig(**{**defaults, "eos_token_ids": frozenset(codec().eos_ids), **changes})
        self.runner = runner(config, depth)
        self.contended = False
        self.pipeline = StepPipeline(config, self.runner, self, EventStream(self.listen), lambda: 0.0)
        self.updates: dict[str, list[SequenceUpdate]] = {}
        self.stats: list[StepDone] = []

    def acquire(self) -> None: ...

    def release(self, step_seconds: float) -> None: ...

    def launching(self) -> AbstractContextManager[None]:
        return nullcontext()

    def engine_idle(self) -> None: ...

    def listen(self, event: EngineEvent) -> None:
        if isinstance(event, StepDone):
            self.stats.append(event)

    def add(self, *requests: Request) -> None:
        for each in requests:
            self.pipeline.scheduler.add(each)

    def advance(self) -> None:
        self.take(self.pipeline.advance(0))
        self.pipeline.scheduler.check_integrity()

    def take(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            self.updates.setdefault(update.request_id, []).append(update)

    def run(self) -> None:
        while self.pipeline.busy:
            self.advance()

    def output(self, name: str) -> list[int]:
        tokens = [update.token.token_id for update in self.updates[name] if update.token is not None]
        finished = self.updates[name][-1].finished
        assert finished is not None
        assert tokens == list(finished.output_ids)
        return tokens

    def text(self, name: str) -> str:
        """Output without the token that ended it, if one did, as the gateway reads updates."""
        tokens = self.output(name)
        last = self.updates[name][-1]
        assert last.finish_reason is FinishReason.STOP, last
        return text_of(tokens[:-1] if last.token is not None else tokens)


def mixed() -> list[Request]:
    thinking = Thinking(THINK_END, 5, (66, 67, THINK_END))
    return [
        *(request(f"json-{i}", constraint=schema(SCHEMAS[i % 2])) for i in range(6)),
        request("regex", constraint=constraint("regex", "[a-c]{3,9}x")),
        request("choices", constraint=constraint("choices", "yes", "no", "no way")),
        request("thinks", constraint=schema(SCHEMAS[0]), thinking=thinking),
        request("budget", thinking=thinking, max_tokens=20, ignore_eos=True),
        *(request(f"plain-{i}", max_tokens=7) for i in range(3)),
    ]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("blocks", [256, 19])
def test_every_output_is_of_its_language(depth: int, blocks: int) -> None:
    bench = Bench(depth, num_blocks=blocks, block_size=2, max_model_len=36)
    bench.add(*mixed())
    bench.run()
    for i in range(6):
        assert jsonschema_rs.is_valid(SCHEMAS[i % 2], json.loads(bench.text(f"json-{i}")))
    assert re.fullmatch("[a-c]{3,9}x", bench.text("regex"))
    assert bench.text("choices") in ("yes", "no", "no way")
    for name in ("thinks", "budget"):
        output = bench.output(name)
        end = output.index(THINK_END)
        assert end < 5 or output[5:8] == [66, 67, THINK_END]
    reasoning, answer = bench.text("thinks").split("</think>")
    assert jsonschema_rs.is_valid(SCHEMAS[0], json.loads(answer)), reasoning
    assert len(bench.output("budget")) == 20
    assert all(len(bench.output(f"plain-{i}")) <= 7 for i in range(3))
    assert (bench.pipeline.scheduler.counts().preemptions > 0) == (blocks == 19)


def test_outputs_do_not_depend_on_overlap_and_preemption() -> None:
    outputs = []
    for depth, blocks in ((1, 256), (2, 256), (2, 19)):
        bench = Bench(depth, num_blocks=blocks, block_size=2, max_model_len=36)
        bench.add(*mixed())
        bench.run()
        outputs.append({each.request_id: bench.output(each.request_id) for each in mixed()})
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("blocks", [256, 19])
def test_outputs_do_not_depend_on_draft_tokens(depth: int, blocks: int) -> None:
    """Rows behind draft tokens have the masks that they would have one by one."""
    plain = Bench(2, block_size=2, max_model_len=36)
    plain.add(*mixed())
    plain.run()
    expected = {each.request_id: plain.output(each.request_id) for each in mixed()}
    bench = Bench(depth, num_blocks=blocks, block_size=2, max_model_len=36, draft_tokens=3)
    bench.runner.known = expected
    bench.add(*mixed())
    bench.run()
    assert {name: bench.output(name) for name in expected} == expected
    counts = bench.pipeline.scheduler.counts()
    assert counts.num_draft_tokens / 5 < counts.num_accepted_tokens < counts.num_draft_tokens
    assert (counts.preemptions > 0) == (blocks == 19)
    assert len(bench.stats) < len(plain.stats)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", range(6, 11))
def test_the_state_of_a_complete_answer_is_kept(depth: int, length: int) -> None:
    """Wherever among draft tokens it ends: none behind it counts, even a right one."""
    prompt, limit = tuple(range(5, 20)), constraint("regex", f"[acegik]{{{length}}}")
    plain = Bench(2)
    plain.add(request("r", prompt, constraint=limit))
    plain.run()
    bench = Bench(depth, draft_tokens=4)
    bench.runner.known = {"r": [*plain.output("r"), *range(9)]}
    bench.add(request("r", prompt, constraint=limit))
    bench.run()
    output = bench.output("r")
    assert output == plain.output("r")
    assert bench.pipeline.scheduler.counts().num_accepted_tokens > 0
    history = (*prompt, *output)
    bench.add(request("next", (*history, 8, 9), max_tokens=2))
    bench.run()
    # With a plan in flight the last token is computed, too.
    assert bench.updates["next"][0].cached_tokens == len(history) - (depth == 1)


def test_a_step_is_opened_before_the_one_before_is_collected_and_sealed_after() -> None:
    bench = Bench(2)
    bench.add(request("r", constraint=constraint("regex", "[ab]{4}")))
    bench.advance()
    assert bench.runner.log == ["open", "seal"], "nothing is before the first"
    bench.advance()
    assert bench.runner.log[2:] == ["open", "seal"]
    assert len(bench.updates["r"]) == 1, "the first token is published"
    bench.run()
    assert re.fullmatch("[ab]{4}", bench.text("r"))


def test_plans_without_constrained_rows_are_launched_as_ever() -> None:
    bench = Bench(2)
    bench.add(request("plain", max_tokens=4))
    bench.run()
    assert bench.runner.log == ["launch"] * 4
    assert all(stats.mask_seconds == 0 for stats in bench.stats)
    bench.add(request("budget", max_tokens=8, ignore_eos=True, thinking=Thinking(THINK_END, 4)))
    bench.run()
    # Masks are only where the budget may be used up: behind four tokens, and not once the reasoning is closed.
    assert bench.runner.log[4:8] == ["launch"] * 4
    assert bench.runner.log[8:10] == ["open", "seal"]
    assert bench.runner.masked_rows == 1


def test_a_request_ends_with_its_last_token_where_nothing_may_follow() -> None:
    bench = Bench(2)
    bench.add(request("r", constraint=constraint("choices", "yes")))
    bench.run()
    *tokens, last = bench.updates["r"]
    assert text_of([update.token.token_id for update in tokens if update.token]) == "yes"
    assert (last.token, last.finish_reason) == (None, FinishReason.STOP)
    assert last.finished is not None
    assert EOS not in last.finished.output_ids
    assert tokens[0].adapter == ""
    assert last.adapter is None


def test_the_token_limit_still_ends_a_request() -> None:
    bench = Bench(1)
    bench.add(request("r", constraint=constraint("regex", "[ab]{40}"), max_tokens=3))
    bench.run()
    assert bench.updates["r"][-1].finish_reason is FinishReason.LENGTH
    assert len(bench.output("r")) == 3


def test_a_stop_token_comes_only_where_the_output_is_complete() -> None:
    for name in "abcdefgh":
        bench = Bench(2)
        bench.add(request(name, constraint=constraint("regex", "[ab]{2,3}"), stop_token_ids=frozenset({9})))
        bench.run()
        assert re.fullmatch("[ab]{2,3}", bench.text(name))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_constraint_that_fails_ends_its_request_alone(depth: int) -> None:
    bench = Bench(depth)
    bad = request("bad", constraint=constraint("regex", "[ab]{30}", param="regex"))
    bench.add(bad, request("good", constraint=constraint("choices", "yes", "nope")), request("plain", max_tokens=9))
    bench.advance()
    bench.advance()
    assert bad.matcher is not None
    grammar = bad.matcher._grammar
    assert grammar is not None
    assert not grammar.consume_token(5)
    bench.run()
    last = bench.updates["bad"][-1]
    assert last.finish_reason is FinishReason.ERROR
    assert last.error is not None
    assert last.error.param == "regex"
    assert bench.text("good") in ("yes", "nope")
    assert bench.updates["plain"][-1].finish_reason in (FinishReason.LENGTH, FinishReason.STOP)


def test_a_token_that_its_mask_excludes_ends_the_request() -> None:
    class Wrong(RandomRunner):
        def _token(self, chunk: Any, mask: Any) -> SampledToken:
            return SampledToken(7, -0.5)

    bench = Bench(2, Wrong)
    bench.add(request("r", constraint=constraint("choices", "yes")))
    bench.run()
    last = bench.updates["r"][-1]
    assert last.finish_reason is FinishReason.ERROR
    assert "is not allowed" in str(last.error)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_abort_between_two_steps_leaves_the_others_their_masks(depth: int) -> None:
    bench = Bench(depth)
    bench.add(*(request(name, constraint=constraint("regex", "[ab]{9}")) for name in ("gone", "stays")))
    for _ in range(3):
        bench.advance()
    update = bench.pipeline.scheduler.abort("gone")
    assert update is not None
    bench.take([update])
    bench.run()
    assert re.fullmatch("[ab]{9}", bench.text("stays"))
    assert bench.updates["gone"][-1].finish_reason is FinishReason.ABORT


@pytest.mark.parametrize("failing", ["open", "seal", "result"])
def test_a_step_that_fails_ends_its_requests_and_the_engine_goes_on(failing: str) -> None:
    class Failing(RandomRunner):
        broken = False

        def open(self, plan: StepPlan) -> Any:
            opened = super().open(plan)
            if len(self.log) < 5 or self.broken:
                return opened
            self.broken = True
            if failing == "open":
                self.unsealed = None
                raise RuntimeError("device lost")

            def fail(*_: Any) -> Any:
                self.unsealed = None
                raise RuntimeError("device lost")

            setattr(opened, failing, fail)
            return opened

    bench = Bench(2, Failing)
    bench.add(request("r", constraint=constraint("regex", "[ab]{20}")))
    bench.run()
    assert bench.updates["r"][-1].finish_reason is FinishReason.ERROR
    assert bench.pipeline.failed_steps >= 1
    bench.add(request("next", constraint=constraint("regex", "[ab]{5}")))
    bench.run()
    assert re.fullmatch("[ab]{5}", bench.text("next"))


def test_what_is_in_flight_is_dropped_whether_sealed_or_not() -> None:
    bench = Bench(2)
    bench.add(request("r", constraint=constraint("regex", "[ab]{20}")))
    bench.advance()
    plan = bench.pipeline.scheduler.schedule(0.0)
    assert plan is not None
    assert bench.pipeline._launch(plan, 0.0)
    assert bench.runner.unsealed is plan
    bench.pipeline.discard()
    assert bench.runner.unsealed is None


def test_under_contention_one_step_at_a_time_is_sealed_at_once() -> None:
    bench = Bench(2)
    bench.add(request("r", constraint=constraint("regex", "[ab]{12}")))
    for turn in range(30):
        bench.contended = turn % 3 == 1
        bench.advance() if bench.pipeline.busy else None
    assert re.fullmatch("[ab]{12}", bench.text("r"))

"""Draft tokens of constrained requests: answers and states are those of a run without any."""

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema_rs
import pytest
from tokenizers import Tokenizer

from models.tiny.recipe.data import DIRECTORY, chat_template, held_out_items, prompt_text
from services.common.adapters.drafter_form import DrafterForm
from services.common.text.tokenizer import TextCodec
from services.engine.compute_sharing.host_lock import SliceGate
from services.engine.constraints.grammars import GrammarLimits, budget_matcher, compile_grammar
from services.engine.constraints.vocabulary import Vocabulary
from services.engine.loop.step_pipeline import StepPipeline
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.models.weights.drafter import grown
from services.engine.observability.events import EventStream
from services.engine.observability.status import Counts
from services.engine.requests.outputs import Finished
from services.engine.requests.request import FinishReason, Request
from services.engine.requests.sampling_params import Constraint, ConstraintKind, SamplingParams, Thinking
from services.engine.scheduler.config import SchedulerConfig
from tests.parity.test_scheduled_generation import make_runner

LIMITS = SchedulerConfig(
    max_num_seqs=8, token_budget=128, block_size=4, num_blocks=400, num_slots=24, max_model_len=512
)
KINDS = {str: "string", int: "integer"}


@pytest.fixture(scope="module")
def model() -> Qwen3_5:
    return Qwen3_5.from_directory(DIRECTORY, dtype="float32", device="cpu", mtp=True)


@pytest.fixture(scope="module")
def vocabulary(model: Qwen3_5) -> Vocabulary:
    return Vocabulary(TextCodec.from_directory(DIRECTORY), model.config.vocab_size, threads=1)


def asked(vocabulary: Vocabulary) -> tuple[list[Request], list[dict[str, object]]]:
    """JSON to extract, under its schema, with noise and penalties; the last ones think within a budget before or
    instead."""
    tokenizer, template = Tokenizer.from_file(str(DIRECTORY / "tokenizer.json")), chat_template()
    made: list[Request] = []
    schemas: list[dict[str, object]] = []
    for number, item in enumerate(held_out_items("extraction", 10)):
        answer = json.loads(item.answer)
        schemas.append(
            {
                "type": "object",
                "properties": {name: {"type": KINDS[type(value)]} for name, value in answer.items()},
                "required": list(answer),
                "additionalProperties": False,
            }
        )
        constraint = Constraint(ConstraintKind.JSON_SCHEMA, (json.dumps(schemas[-1]),))
        sampling = SamplingParams(
            temperature=(0.0, 1.0, 0.7)[number % 3],
            seed=number,
            frequency_penalty=0.1 * (number % 2),
            max_tokens=80,
            constraint=constraint if number < 9 else None,
            thinking=Thinking(tokenizer.token_to_id("</think>"), 6) if number > 7 else None,
        )
        prompt = tuple(tokenizer.encode(prompt_text(item, template)).ids)
        if sampling.constraint is None:
            matcher = budget_matcher(vocabulary, sampling)
        else:
            matcher = compile_grammar(vocabulary, sampling.constraint, GrammarLimits()).matcher(sampling)
        made.append(Request(f"r{number}", prompt, sampling, arrival=number, matcher=matcher))
    return made, schemas


def run(pipeline: StepPipeline, made: list[Request], arrivals: int) -> dict[str, Finished]:
    coming, found = list(made), dict[str, Finished]()
    while coming or pipeline.busy:
        for one in coming[:arrivals]:
            pipeline.scheduler.add(one)
        del coming[:arrivals]
        for update in pipeline.advance(0):
            if update.finished is not None:
                assert update.error is None
                found[update.request_id] = update.finished
        pipeline.scheduler.check_integrity()
    return found


def served(model: Qwen3_5, limits: SchedulerConfig) -> StepPipeline:
    eos = frozenset(TextCodec.from_directory(DIRECTORY).eos_ids)
    limits = replace(limits, eos_token_ids=eos)
    lora = LoraSlots(model.config, 1, 4, model.dtype, model.device)
    return StepPipeline(limits, make_runner(model, limits, lora), SliceGate(1.0), EventStream(), lambda: 0.0)


@pytest.fixture(scope="module")
def blocks() -> Qwen3_5:
    """The same with a block drafter that begins as its mtp layer."""
    form = DrafterForm(6)
    model = Qwen3_5.from_directory(DIRECTORY, dtype="float32", device="cpu", mtp=True, form=form)
    model.stage_drafter(grown(model.checkpoint_drafter(DIRECTORY), model.config.drafter_shapes(form), 0))()
    return model


@pytest.mark.sampled(2)
@pytest.mark.parametrize("changes", [{"draft_tokens": 4, "num_blocks": 90}, {"draft_tokens": 6}, {"draft_tokens": 3}])
def test_constrained_answers_are_the_same(
    model: Qwen3_5, blocks: Qwen3_5, vocabulary: Vocabulary, changes: dict[str, int]
) -> None:
    """At every temperature, and preempted. Conversations go on from the states at the ends of the answers."""
    without = served(model, LIMITS)
    plain = run(without, asked(vocabulary)[0], 3)
    made, schemas = asked(vocabulary)
    drafting = served(blocks if changes["draft_tokens"] > 4 else model, replace(LIMITS, **changes))
    results = run(drafting, made, 3)
    counts: Counts = drafting.scheduler.counts()
    for one, schema in zip(made, schemas, strict=True):
        done, wanted = results[one.request_id], plain[one.request_id]
        assert list(done.output_ids) == list(wanted.output_ids), one.request_id
        assert done.finish_reason is wanted.finish_reason
        if one.sampling.constraint is not None and done.finish_reason is FinishReason.STOP:
            text = vocabulary.tokenizer.decode_str(list(done.output_ids)).split("</think>")[-1].split("<|im_end|>")[0]
            assert jsonschema_rs.is_valid(schema, json.loads(text)), text
    assert (counts.preemptions > 0) == ("num_blocks" in changes)
    # Of a block only the first place is trained here.
    assert counts.num_accepted_tokens / counts.num_draft_tokens > (0.3 if changes["draft_tokens"] < 5 else 0.08)
    more = [
        Request(
            f"more {one.request_id}",
            (*one.prompt_token_ids, *plain[one.request_id].output_ids, 9, 8),
            SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True),
            arrival=90 + place,
        )
        for place, one in enumerate(made)
    ]
    expected = run(without, more, 99)
    for name, done in run(drafting, more, 99).items():
        assert list(done.output_ids) == list(expected[name].output_ids)
        assert done.cached_tokens == expected[name].cached_tokens or "num_blocks" in changes

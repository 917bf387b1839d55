"""Prompts in float8 through a whole engine on a CPU: what it answers is what the model computes so."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.quality.rounding.prompts import Conversation, Replies
from services.engine.models.qwen3_5.model import Qwen3_5
from tests.integration.engine.harness import EngineUnderTest, request

CHOSEN = {"prefill_float8": "mlp,attention:4-7", "prefill_float8_rows": 32, "prefix_cache": False}


@pytest.mark.parametrize("engine_settings", [CHOSEN], indirect=True)
async def test_a_long_prompt_is_rounded_and_a_short_one_is_not(engine: EngineUnderTest) -> None:
    """Decodes behind either are not, so a short prompt's answer is that without the option."""
    model = engine.engine.model
    assert isinstance(model, Qwen3_5)
    assert engine.engine.memory.parts()["copies"] > 0
    without = Qwen3_5(model.config, replace(model.weights, prompt_rows=0))
    chance = random.Random(1)
    for length in (48, 31):
        prompt = tuple(chance.randrange(10, 2000) for _ in range(length))
        answer = await engine.generate(request(prompt, temperature=0.0, top_logprobs=1))
        asked = Conversation(prompt, tuple(answer.token_ids))
        places = range(len(answer.token_ids))
        expected, plain = (
            Replies(each).logprobs(asked)[places, answer.token_ids].tolist() for each in (model, without)
        )
        assert answer.logprobs == pytest.approx(expected, abs=2e-3)
        moved = max(abs(one - other) for one, other in zip(expected, plain, strict=True))
        assert (moved > 1e-2) == (length >= 32)

"""Memory plans of the cards that people have: what each serves and trains, and how what it cannot is refused."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
import torch

from services.common.errors import DoesNotFit
from services.engine.kv_cache.memory_plan import MemoryPlan
from services.engine.models.lora.targets import target_shapes
from services.engine.settings import EngineSettings
from services.pod import memory
from services.pod.device import Device
from services.pod.memory import device_bytes, limit_allocations, plan, state_slots
from services.trainer.jobs.adapter_run import USUAL_TOKENS
from services.trainer.memory.estimate import Workload, estimate
from tests.unit.pod.test_memory import QWEN_4B

GIB = 2**30
CARDS = {
    16: (15.0, (8, 9)),
    24: (22.0, (8, 9)),
    40: (38.9, (8, 0)),
    48: (44.0, (8, 9)),
    80: (78.7, (9, 0)),
    141: (139.2, (9, 0)),
}
"""GiB that a process finds free, and compute capability, by the card's size."""
L4 = Device("cuda", "L4", (8, 9))


def planned(free: float, device: Device = L4, **given: Any) -> tuple[EngineSettings, MemoryPlan]:
    return plan(QWEN_4B, EngineSettings(device="cuda", **given), torch.bfloat16, device, int(free))


def job_bytes(tokens: int) -> int:
    """Bytes of a job of rank 16 on all linear layers, with microbatches of so many tokens."""
    numbers = sum(16 * (out + into) for out, into in target_shapes(QWEN_4B).values())
    return estimate(QWEN_4B, Workload(numbers, 16, tokens, 2, "full", fused=True)).total


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("quantization", ["none", "fp8", "int4"])
def test_every_card_has_a_plan_or_numbers(card: int, quantization: str) -> None:
    free, capability = CARDS[card]
    device = Device("cuda", f"{card} GB", capability)
    if quantization == "fp8" and not device.has_float8:
        pytest.skip("the card has no float8")
    kv_types = ("auto", "fp8") if device.has_float8 else ("auto",)
    contexts = []
    for kv, state, trainer in product(kv_types, ("float32", "bfloat16"), (True, False)):
        given = {"quantization": quantization, "kv_cache_dtype": kv, "state_dtype": state, "trainer": trainer}
        chosen, made = planned(free * GIB, device, **given)
        assert made.total <= made.budget <= free * GIB
        assert sum(made.parts().values()) == made.total
        assert made.states % state_slots(chosen) == 0
        assert 2048 <= chosen.token_budget <= 8192
        assert chosen.mixed_prefill_tokens <= chosen.token_budget
        assert (made.training > 0) is trainer
        # Each sequence may have a few hundred tokens at once, and one of them a long prompt.
        assert made.capacity_tokens >= max(8192, 256 * chosen.max_num_seqs)
        if trainer and (card > 16 or quantization == "int4"):
            assert made.training >= job_bytes(1024)
        contexts.append(made.capacity_tokens)
    assert max(contexts) > min(contexts)


def test_a_smaller_card_computes_fewer_tokens_a_step() -> None:
    budgets = {card: planned(free * GIB)[0].token_budget for card, (free, _) in CARDS.items()}
    assert budgets == {16: 2048, 24: 2048, 40: 4096, 48: 4096, 80: 8192, 141: 8192}
    assert planned(22 * GIB, token_budget=8192)[0].token_budget == 8192, "what is asked for is kept"
    assert planned(78.7 * GIB, max_num_seqs=300, speculative="mtp")[0].token_budget == 8192
    assert planned(22 * GIB, max_num_seqs=16, speculative="mtp")[0].token_budget == 2048


def test_22_gb_in_bf16_serve_64_and_train_beside() -> None:
    # CUDA's context is no part of what is planned.
    chosen, made = planned(22e9 - GIB // 2, max_num_seqs=64)
    assert chosen.max_num_seqs == 64
    assert made.training >= job_bytes(1024)
    assert made.capacity_tokens >= 64 * 768, "512 tokens in and 256 out of each"


def test_22_gb_train_two_of_2048_in_the_usual_microbatches() -> None:
    """Without any setting: one document a microbatch, which is what a job gets that names no other size."""
    chosen, made = planned(22e9 - GIB // 2)
    assert chosen.max_num_seqs == 64
    assert made.training >= job_bytes(USUAL_TOKENS)
    assert made.kv >= made.training
    assert made.capacity_tokens >= 64 * 768


def test_a_smaller_card_holds_fewer_adapters() -> None:
    slots = {card: planned(free * GIB)[0].adapter_slots for card, (free, _) in CARDS.items()}
    assert slots == {16: 4, 24: 5, 40: 8, 48: 8, 80: 8, 141: 8}
    assert planned(22 * GIB, adapter_slots=8)[0].adapter_slots == 8, "what is asked for is kept"
    assert EngineSettings().for_device("cpu").adapter_slots == 8
    with pytest.raises(ValueError, match=r"adapter_slots must be 0 \(automatic\) or at least 2"):
        EngineSettings(adapter_slots=1)


def test_22_gb_with_states_in_bf16_train_two_of_2048_packed() -> None:
    given = {"max_num_seqs": 64, "state_dtype": "bfloat16", "train_memory_bytes": "3GiB"}
    _, made = planned(22e9 - GIB // 2, **given)
    assert made.training >= job_bytes(2 * 2048)
    assert made.capacity_tokens >= 64 * 768


def test_14_gb_in_int4_serve_and_train() -> None:
    chosen, made = planned(14e9 - GIB // 2, quantization="int4")
    assert chosen.max_num_seqs >= 8
    assert made.training >= job_bytes(1024)
    assert made.capacity_tokens >= 32_768


def test_float8_pages_hold_twice_the_context() -> None:
    plain, float8 = (planned(22 * GIB, kv_cache_dtype=kind)[1] for kind in ("auto", "fp8"))
    assert 1.9 < float8.capacity_tokens / plain.capacity_tokens < 2


@pytest.mark.parametrize(
    "given",
    [
        {"kv_cache_bytes": "40GiB"},
        {"train_memory_bytes": "30GiB"},
        {"max_num_seqs": 4096},
        {"adapter_slots": 256},
        {"state_snapshots": 5000},
        {"token_budget": 262144},
        {"memory_fraction": 0.3},
    ],
    ids=lambda given: next(iter(given)),
)
def test_what_cannot_be_is_refused_with_numbers(given: dict[str, Any]) -> None:
    with pytest.raises(DoesNotFit) as refused:
        planned(22 * GIB, **given)
    message = refused.value.message
    assert re.search(r"lacks [\d.]+ [GM]iB: [\d.]+ GiB are needed, of [\d.]+ GiB|no KV block", message)
    assert re.search(r"(?m)^weights +7\.83 GiB$", message)
    assert f"TEMPER_{next(iter(given)).upper()} (now" in message


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A card with 20 of 24 GiB free; the list gets the shares that the allocator is held to."""
    shares: list[float] = []
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (20 * GIB, 24 * GIB))
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", lambda share, _: shares.append(share))
    return shares


def test_a_limit_leaves_the_context_out(card: list[float]) -> None:
    limited = EngineSettings(device="cuda", device_memory="16GiB")
    assert device_bytes(L4) == 20 * GIB
    assert device_bytes(L4, int(limited.device_memory)) == 15.5 * GIB
    limit_allocations(L4, limited)
    limit_allocations(L4, EngineSettings(device="cuda"))
    assert card == [15 / 24], "graphs and kernels are outside the allocator"


@pytest.mark.parametrize("limit", ["24GiB", "400MiB"])
@pytest.mark.usefixtures("card")
def test_a_limit_that_cannot_be_kept_is_refused(limit: str) -> None:
    settings = EngineSettings(device="cuda", device_memory=limit)
    says = (
        r"TEMPER_DEVICE_MEMORY=[\d.]+ [GM]iB must be more than the 512.00 MiB .*at most the 20.50 GiB .* of 24.00 GiB"
    )
    with pytest.raises(DoesNotFit, match=says):
        memory.device_bytes(L4, int(settings.device_memory))

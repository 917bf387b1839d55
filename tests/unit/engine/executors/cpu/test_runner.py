"""The batch a runner builds, seen by a model that only records it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from services.engine.executors.cpu.runner import BlockTables, ModelRunner
from services.engine.models.batch import CacheBuffers, ForwardBatch
from services.engine.requests.adapter import AdapterPin
from services.engine.requests.request import Request
from services.engine.requests.sampling_params import SamplingParams
from services.engine.scheduler.step_plan import Chunk, StateCopy, StepPlan

BLOCK = 4


class RecordingModel:
    """Answers every logit row with its own row number as the likeliest token."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def forward(self, batch: ForwardBatch, cache: CacheBuffers, lora: object) -> torch.Tensor:
        self.calls.append((batch, lora))
        return batch.logit_rows.unsqueeze(1).float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(hidden.squeeze(1).long(), 64).float()

    def copy_state(self, cache: CacheBuffers, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.calls.append((list(sources), list(targets)))


def runner(model: RecordingModel) -> ModelRunner:
    cache = CacheBuffers((), (), (), (), BLOCK)
    return ModelRunner(cast(Any, model), cache, cast(Any, "lora"), num_slots=9, eos_token_ids=[0])


def chunk(name: str, tokens: list[int], start: int, blocks: list[int], slot: int, **fields: Any) -> Chunk:
    request = Request(name, (1,), SamplingParams(temperature=0.0), pin=fields.pop("pin", AdapterPin()))
    return Chunk(request, tokens, start, blocks, slot, fields.pop("samples", True), [], 0)


def test_a_mixed_step() -> None:
    model = RecordingModel()
    plan = StepPlan(
        chunks=[
            chunk("a", [50], 5, [3, 7, 9], 2),
            chunk("b", [51], 3, [8], 1, pin=AdapterPin("x@1", "digest", 4)),
            chunk("c", [10, 11, 12, 13, 14], 0, [5, 6], 3, samples=False),
            chunk("d", [20, 21, 22], 6, [1, 2, 4], 5),
        ],
        copies_before=[StateCopy(7, 5)],
        copies_after=[StateCopy(3, 8)],
    )
    result = runner(model).execute(plan)
    assert model.calls[0] == ([7], [5])
    assert model.calls[2] == ([3], [8])
    batch, lora = model.calls[1]
    assert lora == "lora"
    assert batch.token_ids.tolist() == [50, 51, 10, 11, 12, 13, 14, 20, 21, 22]
    assert batch.positions.tolist() == [5, 3, 0, 1, 2, 3, 4, 6, 7, 8]
    assert batch.kv_slots.tolist() == [29, 35, 20, 21, 22, 23, 24, 10, 11, 16]
    assert batch.block_tables.tolist() == [[3, 7, 9], [8, 0, 0], [5, 6, 0], [1, 2, 4]]
    assert batch.state_slots.tolist() == [2, 1, 3, 5]
    assert batch.adapter_slots.tolist() == [0, 4, 0, 0]
    assert batch.has_adapters
    assert batch.num_decodes == 2
    assert (list(batch.lengths), list(batch.starts)) == ([1, 1, 5, 3], [5, 3, 0, 6])
    assert batch.logit_rows.tolist() == [0, 1, 9]
    assert [token.token_id for token in result.tokens] == [0, 1, 9]


def test_a_base_batch_skips_lora() -> None:
    model = RecordingModel()
    runner(model).execute(StepPlan([chunk("a", [5], 1, [3], 1)]))
    batch, lora = model.calls[0]
    assert lora is None
    assert not batch.has_adapters


def test_a_one_token_prompt_is_not_a_decode() -> None:
    """start 0 means that the state slot holds garbage, which only the prefill path treats as zero."""
    model = RecordingModel()
    runner(model).execute(StepPlan([chunk("a", [5], 0, [3], 1)]))
    assert model.calls[0][0].num_decodes == 0


def test_nothing_to_sample() -> None:
    model = RecordingModel()
    result = runner(model).execute(StepPlan([chunk("a", [5, 6], 0, [3], 1, samples=False)]))
    assert list(result.tokens) == []


def test_block_tables_grow_and_forget() -> None:
    tables = BlockTables(3)
    assert tables.rows([1], [[5]], 1).tolist() == [[5]]
    assert tables.rows([2, 1], [[9, 8], [5, 6, 7]], 3).tolist() == [[9, 8, 0], [5, 6, 7]]
    assert tables.rows([1], [[5, 4]], 3).tolist() == [[5, 4, 0]], "another sequence in the same slot"
    assert tables.rows([1], [[3]], 3).tolist() == [[3, 0, 0]]
    long = list(range(1, 41))
    assert tables.rows([1, 2], [long, [9, 8, 1]], 40).tolist() == [long, [9, 8, 1] + [0] * 37]

"""benchmarks.prefix_cache.device on a small model in the interpreter: it finds what is wrong, and measures every
way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from unittest.mock import patch

import pytest
import torch

from benchmarks.prefix_cache import device as prefix_device
from benchmarks.prefix_cache.device import Bench, check_snapshots, check_transfer, results
from services.engine.executors.cuda.cache_transfer import CudaCacheTransfer
from services.engine.kv_offload.messages import Bytes, Fence
from services.engine.scheduler.step_plan import StepPlan
from tests.kernels.gpu import interpreter  # noqa: F401
from tests.parity.fused_models import TINY


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    made = Bench.build(TINY, torch.device("cpu"), most=80)
    yield made
    made.transfer.close()


@pytest.mark.thorough
def test_every_way_is_measured(bench: Bench) -> None:
    lines = list(results(bench, TINY, lengths=[50], moved=[32], repeats=1))
    prompts = [(line["snapshots"], line["way"]) for line in lines if line["what"] == "prefill"]
    ways = ("one step", "steps", "one step, nothing rounded")
    assert prompts == [(0, "one step"), *((count, way) for count in (1, 2) for way in ways)]
    moved = [(line["way"], line.get("piece_bytes")) for line in lines if line["what"] == "transfer"]
    sizes = [(way, piece) for piece in prefix_device._PIECES for way in ("save", "load")]
    assert moved == [*sizes, ("torch save", None), ("torch load", None)]
    assert [line["kind"] for line in lines if line["what"] == "copy"] == ["blocks", "states"]
    assert all(line["ms"] > 0 for line in lines if line["what"] in ("prefill", "transfer"))


@pytest.mark.thorough
def test_snapshots_of_another_position_are_found(bench: Bench) -> None:
    steps = prefix_device.in_steps

    def later(plan: StepPlan) -> list[StepPlan]:
        (chunk,) = plan.chunks
        return steps(StepPlan([chunk._replace(snapshots=[(at + 1, slot) for at, slot in chunk.snapshots])]))

    with (
        torch.inference_mode(),
        patch.object(prefix_device, "in_steps", later),
        pytest.raises(RuntimeError, match="snapshots differ"),
    ):
        check_snapshots(bench, 50)


def test_payloads_that_change_on_their_way_are_found(bench: Bench) -> None:
    load = CudaCacheTransfer.load

    def spoiled(
        self: CudaCacheTransfer, source: Sequence[Bytes], blocks: Sequence[int], slot: int, after: Fence
    ) -> Sequence[int]:
        source[0][3] ^= 1
        return load(self, source, blocks, slot, after)

    with (
        torch.inference_mode(),
        patch.object(CudaCacheTransfer, "load", spoiled),
        pytest.raises(RuntimeError, match="not those of its save"),
    ):
        check_transfer(bench, 32)

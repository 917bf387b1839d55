"""Where a merge runs, what memory it reserves, and what it says when there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.adapter_tools.merge import Merged, Weighted, merge_layer, working_bytes
from services.adapter_tools.workshop import ALONE, Workshop
from services.common.errors import DoesNotFit
from services.common.jobs import MergeSettings
from services.engine.models.lora.targets import target_shapes
from services.trainer.jobs import merge as merge_module
from services.trainer.jobs.merge import MergeRun
from services.trainer.memory.budget import MemoryBudget, MemoryNeed, MemoryTaken
from tests.training_support import TrainingHost
from tests.unit.trainer.jobs.test_merge_run import finish, job, mixed, parent_versions

METHODS = ["ties", "dare_linear", "dare_ties"]
JOB = "the running job"


def sparse_job(method: str = "ties", **fields: Any) -> Any:
    return job(1.0, 0.5, 0.25, method=method, rank=3, density=0.4, **fields)


def planned(host: TrainingHost) -> int:
    shapes = target_shapes(host.model.config).values()
    return max(working_bytes(shape, 3, sparse_job(), Workshop()) for shape in shapes)


@pytest.mark.parametrize("method", METHODS)
def test_the_largest_layer_is_reserved_and_every_piece_takes_its_turn(host: TrainingHost, method: str) -> None:
    run = MergeRun(sparse_job(method), host, parent_versions(*mixed(host)))
    held = host.memory_budget.held()[JOB]
    assert held.resident == 0
    assert 0 < held.working <= planned(host)
    assert len(run.notes) == 1
    finish(run)
    assert host.gate.entered >= 5 * len(run.lora.targets), "at least a turn for each part of each matrix"
    assert host.gate.gave_way > 0
    assert not host.gate.inside


@pytest.mark.parametrize("fields", [{}, {"method": "svd", "rank": 3}])
def test_factors_need_no_memory_of_the_plan(host: TrainingHost, fields: dict[str, Any]) -> None:
    small = TrainingHost.__new__(TrainingHost)
    small.__dict__ |= host.__dict__ | {"train_memory_bytes": 0, "memory_budget": MemoryBudget(0)}
    run = MergeRun(job(1.0, 1.0, 1.0, **fields), small, parent_versions(*mixed(host)))
    finish(run)
    assert host.gate.entered == len(run.lora.targets), "the CPU is what is shared"


def test_a_cpu_without_room_refuses_with_the_plan(host: TrainingHost) -> None:
    host.train_memory_bytes = 1000
    with pytest.raises(DoesNotFit, match=r"needs .* MiB .* leaves 0\.0 MiB for training: merge by weighted or svd"):
        MergeRun(sparse_job(), host, parent_versions(*mixed(host)))
    assert host.memory_budget.held() == {}


def test_it_waits_for_open_sessions(host: TrainingHost) -> None:
    host.memory_budget.reserve_session("a", MemoryNeed(host.train_memory_bytes - 100, 0))
    with pytest.raises(MemoryTaken, match="the job waits for memory"):
        MergeRun(sparse_job(), host, parent_versions(*mixed(host)))
    host.memory_budget.release_session("a")
    MergeRun(sparse_job(), host, parent_versions(*mixed(host)))


def test_a_gpu_without_room_leaves_it_to_the_cpu_and_says_so(host: TrainingHost) -> None:
    gpu = SimpleNamespace(
        model=SimpleNamespace(config=host.model.config, device=torch.device("cuda")),
        gate=host.gate,
        max_lora_rank=32,
        train_memory_bytes=1000,
        memory_budget=MemoryBudget(1000),
    )
    run = MergeRun(sparse_job(), gpu, parent_versions(*mixed(host)))  # type: ignore[arg-type]
    assert run.notes[1].startswith("on the CPU: the largest layer needs")
    assert gpu.memory_budget.held() == {}
    there = finish(run)
    assert host.gate.entered == 0, "nothing of it is on the device that is shared"
    here = MergeRun(sparse_job(), host, parent_versions(*mixed(host)))
    assert finish(here) == there
    assert here.lora.to_files("base") == run.lora.to_files("base")


def test_running_out_of_memory_says_what_was_planned(host: TrainingHost, monkeypatch: pytest.MonkeyPatch) -> None:
    run = MergeRun(sparse_job(), host, parent_versions(*mixed(host)))
    run.step(0)
    before = run.state()

    def full(path: str, given: Sequence[Weighted], *rest: Any) -> Merged:
        if path.endswith("up_proj"):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return merge_layer(path, given, *rest)

    monkeypatch.setattr(merge_module, "merge_layer", full)
    with pytest.raises(
        DoesNotFit, match=r"merged layers\.1\.mlp\.up_proj.*plan of .* MiB.*TEMPER_MEMORY_FRACTION"
    ) as no:
        run.step(1)
    assert no.value.param == "method"
    after = run.state()
    assert after.data == before.data, "nothing of the step is left"
    monkeypatch.undo()
    finish(run, 1)
    whole = MergeRun(sparse_job(), host, parent_versions(*mixed(host)))
    finish(whole)
    assert run.lora.to_files("base") == whole.lora.to_files("base")


def test_a_merge_in_small_pieces_is_the_same_but_for_rounding(host: TrainingHost) -> None:
    settings: MergeSettings = sparse_job()
    run = MergeRun(settings, host, parent_versions(*mixed(host)))
    finish(run)
    run_in_pieces = MergeRun(settings, host, parent_versions(*mixed(host)))
    run_in_pieces._shop = replace(ALONE, numbers=64)
    finish(run_in_pieces)
    for path, target in run.lora.targets.items():
        pieces = run_in_pieces.lora.targets[path]
        whole = (target.b.double() @ target.a.double()).detach()
        difference = (pieces.b.double() @ pieces.a.double()).detach() - whole
        assert float(difference.norm()) <= 1e-4 * float(whole.norm()), path

"""A merge as a job: parents of different shapes, what is refused, and resuming in the middle."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import CONFIG, WEIGHTS
from services.common.errors import InvalidRequest
from services.common.jobs import MergeJob
from services.engine.models.lora.binding import BoundAdapter, bind_adapter
from services.engine.models.lora.trainable import LoraParams
from services.trainer.jobs import prepare_run
from services.trainer.jobs.base import JobRun
from services.trainer.parent_versions import ParentVersion
from tests.training_support import TrainingHost
from tests.unit.adapter_tools.adapters import adapter


def job(*weights: float, **fields: Any) -> MergeJob:
    sources = [{"adapter": f"parent{index}@1", "weight": weight} for index, weight in enumerate(weights)]
    return MergeJob.model_validate({"adapter": "merged", "sources": sources, **fields})


def parent_versions(*files: dict[str, bytes]) -> list[ParentVersion]:
    return [ParentVersion(AdapterVersion(f"parent{i}", 1), f"digest-{i}", part) for i, part in enumerate(files)]


def finish(run: JobRun, start: int = 0) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for index in range(start, run.total_steps):
        metrics = run.step(index)
    return metrics


def deltas(bound: BoundAdapter) -> dict[str, torch.Tensor]:
    return {path: t.scale * t.b.double() @ t.a.double() for path, t in bound.targets.items()}


def mixed(host: TrainingHost) -> list[dict[str, bytes]]:
    """Different ranks, alphas, scalings and layers."""
    config = host.model.config
    return [
        adapter(config, rank=4, alpha=8, modules=["q_proj", "up_proj", "in_proj_a"], seed=1),
        adapter(config, rank=7, alpha=3, rslora=True, modules=["q_proj", "down_proj", "in_proj_a"], seed=2),
        adapter(config, rank=2, alpha=2, seed=3),
    ]


def test_parents_of_different_shapes(host: TrainingHost) -> None:
    weights = [0.7, -0.4, 1.5]
    parents = mixed(host)
    run = prepare_run(job(*weights), host, None, parent_versions(*parents))
    metrics = finish(run)
    files = run.lora.to_files("base")
    merged = deltas(bind_adapter(files, host.model.config, max_rank=32))
    exact: dict[str, torch.Tensor] = {}
    for weight, part in zip(weights, parents, strict=True):
        for path, delta in deltas(bind_adapter(part, host.model.config, max_rank=32)).items():
            exact[path] = exact.get(path, 0) + weight * delta
    assert merged.keys() == exact.keys()
    for path, delta in exact.items():
        assert float((merged[path] - delta).norm() / delta.norm()) < 1e-6, path
    assert metrics["merge_error_max"] < 1e-6
    config = json.loads(files[CONFIG])
    assert config["r"] == 2
    assert config["rank_pattern"]["layers.1.self_attn.q_proj"] == 13
    assert config["alpha_pattern"]["layers.1.self_attn.q_proj"] == 13.0
    assert config["use_rslora"] is False
    lineage = run.lineage
    assert lineage is not None
    assert [(p.version, p.weight, p.digest) for p in lineage.parents] == [
        (f"parent{i}@1", weights[i], f"digest-{i}") for i in range(3)
    ]


def test_one_parent_of_weight_one_is_that_parent_to_the_engine(host: TrainingHost) -> None:
    parents = mixed(host)
    tokens = torch.tensor([5, 9, 2, 30, 31, 7])

    def hidden(lora: LoraParams) -> torch.Tensor:
        with torch.no_grad(), host.gate.training():
            return host.model.forward_train(tokens, [6], lora, recompute="none", give_way=host.gate.give_way)

    merged = []
    for weights, sources in (((1.0,), parents[1:2]), ((1.0, 0.5), parents[1:])):
        run = prepare_run(job(*weights), host, None, parent_versions(*sources))
        finish(run)
        merged.append(hidden(run.lora))
    original = hidden(LoraParams.from_bound(bind_adapter(parents[1], host.model.config, max_rank=32)))
    assert torch.allclose(merged[0], original, atol=1e-5)
    assert not torch.allclose(merged[1], original, atol=1e-2)


@pytest.mark.parametrize("method", ["ties", "dare_linear", "dare_ties"])
def test_a_merge_resumes_to_the_same_bytes(host: TrainingHost, method: str) -> None:
    spec = job(1.0, 0.5, 0.25, method=method, rank=3, density=0.4, seed=5)
    parents = parent_versions(*mixed(host))
    whole = prepare_run(spec, host, None, parents)
    metrics = finish(whole)
    assert 0 < metrics["merge_error_mean"] <= metrics["merge_error_max"] < 1
    lineage = whole.lineage
    assert lineage is not None
    assert lineage.error_max == metrics["merge_error_max"]

    first = prepare_run(spec, host, None, parents)
    first.step(0)
    first.step(1)
    state = first.state()
    second = prepare_run(spec, host, None, parents)
    assert second.load_state(state) == 2
    assert finish(second, 2) == metrics
    assert second.lora.to_files("base") == whole.lora.to_files("base")
    assert second.lineage == lineage

    other = prepare_run(spec.model_copy(update={"seed": 6}), host, None, parents)
    with pytest.raises(InvalidRequest, match="another job"):
        other.load_state(state)
    finish(other)
    assert (other.lora.to_files("base")[WEIGHTS] != whole.lora.to_files("base")[WEIGHTS]) == (method != "ties")


def test_an_interrupted_layer_leaves_nothing(host: TrainingHost) -> None:
    class Stop(Exception):
        pass

    calls = iter([None, None])

    def interrupt() -> None:
        if next(calls, Stop) is Stop:
            raise Stop

    run = prepare_run(job(1.0), host, None, parent_versions(mixed(host)[2]))
    with pytest.raises(Stop):
        run.step(0, interrupt)
    assert run.state().data["errors"] == {}


def test_ranks_over_the_engines_limit_are_refused_with_the_way_out(host: TrainingHost) -> None:
    config = host.model.config
    wide = parent_versions(*(adapter(config, rank=20, modules=["q_proj"], seed=seed) for seed in (1, 2)))
    with pytest.raises(InvalidRequest, match=r"rank 40.*up to rank 32.*give rank"):
        prepare_run(job(1, 1), host, None, wide)
    with pytest.raises(InvalidRequest, match="rank is 33"):
        prepare_run(job(1, 1, rank=33), host, None, wide)
    assert prepare_run(job(1, 1, rank=32), host, None, wide).total_steps == 2
    apart = [adapter(config, rank=20, modules=[name], seed=1) for name in ("q_proj", "v_proj")]
    assert prepare_run(job(1, 1), host, None, parent_versions(*apart)).total_steps == 2, "no layer has more than 20"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"method": "ties", "density": 0.5}, "rank"),
        ({"method": "ties", "rank": 4}, "density"),
        ({"method": "weighted", "density": 0.5}, "density"),
        ({"method": "svd"}, "rank"),
        ({"sources": [{"adapter": "a@1"}, {"adapter": "a@1"}]}, "more than once"),
        ({"sources": [{"adapter": "a@1", "weight": 0}]}, "weight"),
        ({"sources": [{"adapter": "a@1", "weight": float("nan")}]}, "weight"),
        ({"sources": [{"adapter": "../x"}]}, "adapter"),
        ({"sources": []}, "sources"),
        ({"density": 0, "method": "ties", "rank": 2}, "density"),
        ({"learning_rate": 0.1}, "learning_rate"),
    ],
)
def test_what_does_not_go_together(fields: dict[str, Any], param: str) -> None:
    body = {"adapter": "merged", "sources": [{"adapter": "a@1"}, {"adapter": "b"}], **fields}
    with pytest.raises(ValueError, match=param):
        MergeJob.model_validate(body)

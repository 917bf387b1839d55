"""What a job starts from, and what it says of rollouts that somebody else sampled."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import AdapterRegistry
from services.common.errors import InvalidRequest, ModelNotFound
from services.common.jobs import GrpoJob, SftJob
from services.trainer.parent_versions import ParentVersion, resolve, sampled_elsewhere
from tests.unit.gateway.fake_stores import MemoryStore

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}


@pytest.fixture
def registry() -> AdapterRegistry:
    return AdapterRegistry(MemoryStore(), "qwen3.5")  # type: ignore[arg-type]


def grpo(*samplers: str | None, **fields: Any) -> GrpoJob:
    completions = [
        {"token_ids": [3], "logprobs": [-0.5], "reward": number, "adapter": name}
        for number, name in enumerate(samplers)
    ]
    group = {"prompt_token_ids": [1, 2], "completions": completions}
    return GrpoJob.model_validate({"adapter": "bot", "groups": [group], **fields})


def test_rollouts_of_a_version_that_never_was_are_refused(registry: AdapterRegistry) -> None:
    """A job that came straight from Redis has been seen by no gateway."""
    version = registry.publish("bot", FILES, base_digest="x").ref
    assert resolve(grpo("bot@1", "base", None), registry) == [version]
    for unknown in ("bot@2", "ghost@1"):
        with pytest.raises(ModelNotFound, match=f"{unknown} was never published") as refused:
            resolve(grpo("bot@1", unknown), registry)
        assert refused.value.param == "groups[0].completions[1].adapter"


def test_rollouts_of_too_many_versions_are_refused(registry: AdapterRegistry) -> None:
    for _ in range(65):
        registry.publish("bot", FILES, base_digest="x")
    assert resolve(grpo(*(f"bot@{number}" for number in range(1, 65))), registry)
    with pytest.raises(InvalidRequest, match="by 65 adapter versions, over the limit of 64"):
        resolve(grpo(*(f"bot@{number}" for number in range(1, 66))), registry)


def test_rollouts_of_a_version_that_was_deleted_meanwhile_are_learnt_from(registry: AdapterRegistry) -> None:
    registry.publish("bot", FILES, base_digest="x")
    registry.delete("bot")
    assert resolve(grpo("bot@1", "bot@1"), registry) == []


def test_what_is_said_of_rollouts_that_another_policy_sampled() -> None:
    bot = ParentVersion(AdapterVersion("bot", 3), "digest", {})
    assert sampled_elsewhere(grpo("bot@3", "bot@3", None), [bot]) is None
    assert sampled_elsewhere(grpo(None, None), [bot]) is None
    assert sampled_elsewhere(grpo("base", None), []) is None
    said = sampled_elsewhere(grpo("bot@3", "bot@2", "base", "bot@2", None), [bot])
    assert said is not None
    assert said == "3 of 4 rollouts that say who sampled them come from base, bot@2, and the job continues bot@3"
    said = sampled_elsewhere(grpo(*(f"x@{number}" for number in range(1, 8))), [])
    assert said is not None
    assert "x@1, x@2, x@3, x@4, x@5 and 2 more, and the job continues base" in said
    sft = SftJob.model_validate({"adapter": "bot", "examples": [{"prompt": "a", "completion": "b"}]})
    assert sampled_elsewhere(sft, [bot]) is None

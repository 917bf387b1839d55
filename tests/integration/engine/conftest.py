"""A real engine with the tiny model on real gRPC, in this process; adapters come from a real S3 server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from services.common.adapters.registry import AdapterRegistry
from services.common.settings import CommonSettings
from services.engine.settings import EngineSettings
from services.pod.engine import build_engine
from tests.integration.engine.harness import EngineUnderTest

TINY = Path(__file__).resolve().parents[3] / "models" / "tiny"


@pytest.fixture
def engine_settings(settings: CommonSettings, request: pytest.FixtureRequest) -> EngineSettings:
    """A test that wants others is parametrized with them."""
    usual = {
        "model": TINY,
        "device": "cpu",
        "max_num_seqs": 8,
        "token_budget": 64,
        "num_blocks": 129,
        "max_model_len": 512,
        "state_snapshots": 8,
        "adapter_slots": 3,
        "max_lora_rank": 8,
        "adapter_poll_seconds": 0.2,
        "max_waiting": 64,
    }
    common = {name: getattr(settings, name) for name in CommonSettings.model_fields}
    return EngineSettings(**common, **usual | getattr(request, "param", {}))


@pytest.fixture
async def engine(registry: AdapterRegistry, engine_settings: EngineSettings) -> AsyncIterator[EngineUnderTest]:
    torch.set_num_threads(1)
    async with EngineUnderTest(build_engine(engine_settings, registry, None), registry) as under_test:
        yield under_test
        await under_test.assert_nothing_left()

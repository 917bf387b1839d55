"""One random checkpoint a configuration, made once; one engine a file of tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import Qwen3_5ForCausalLM

from services.engine.models.qwen3_5.model import Qwen3_5
from tests.parity.reference import CONFIGS, make_checkpoint
from tests.rollout_support import Pod, running_pod


@dataclass(frozen=True)
class Pair:
    """transformers' model and ours, with the same weights."""

    path: Path
    reference: Qwen3_5ForCausalLM
    model: Qwen3_5


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    made: dict[str, Pair] = {}
    for name in CONFIGS:
        path = tmp_path_factory.mktemp(name)
        reference = make_checkpoint(name, path)
        made[name] = Pair(path, reference, Qwen3_5.from_directory(path, dtype="float32", device="cpu"))
    return made


@pytest.fixture(scope="module")
def shared() -> Iterator[Pod]:
    """An engine of the tiny trained model with its trainer's host, for all tests of a file."""
    with running_pod() as pod:
        yield pod


@pytest.fixture
def pod(shared: Pod) -> Iterator[Pod]:
    """The same, of which a test has to leave nothing behind."""
    yield shared
    shared.settle()

"""One random checkpoint a configuration, made once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import Qwen3_5ForCausalLM

from services.engine.model.qwen3_5 import Qwen3_5
from tests.parity.reference import CONFIGS, make_checkpoint


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

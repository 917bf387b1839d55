"""A pod's training side without the pod, for tests of the trainer and for their processes, which import it quickly."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from services.common.adapters.names import AdapterVersion
from services.common.text.tokenizer import TextCodec
from services.engine.models.qwen3_5.model import Qwen3_5
from services.trainer.memory.budget import MemoryBudget

CPU = torch.device("cpu")


class CountingGate:
    """Lets everything through and counts."""

    def __init__(self) -> None:
        self.entered = 0
        self.inside = False
        self.gave_way = 0

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        if self.inside:
            raise RuntimeError("the gate was entered twice")
        self.entered += 1
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    def give_way(self) -> None:
        if not self.inside:
            raise RuntimeError("give_way outside of training()")
        self.gave_way += 1


class TrainingHost:
    """PolicyHost over a checkpoint directory, without an engine."""

    def __init__(self, directory: Path, *, max_train_tokens: int = 512, train_memory_bytes: int = 2**31) -> None:
        self.model = Qwen3_5.from_directory(directory, dtype=torch.float32, device=CPU)
        self.checkpoint = directory
        self.codec = TextCodec.from_directory(directory)
        self.base_digest = "test"
        self.gate = CountingGate()
        self.max_train_tokens = max_train_tokens
        self.max_lora_rank = 32
        self.train_memory_bytes = train_memory_bytes
        self.memory_budget = MemoryBudget(train_memory_bytes)
        self.drafter: str | None = None
        self.published: dict[AdapterVersion, Mapping[str, bytes]] = {}

    def checkpoint_drafter(self) -> Mapping[str, torch.Tensor]:
        """Of a checkpoint that has an mtp layer."""
        return self.model.checkpoint_drafter(self.checkpoint)

    def adapter_files(self, version: AdapterVersion) -> Mapping[str, bytes]:
        """Files of a version that a test has put into `published`."""
        return self.published[version]

    def sync_adapters(self, version: AdapterVersion | None, timeout: float) -> None:
        """There is nothing to sync."""

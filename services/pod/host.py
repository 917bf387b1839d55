"""Serving side of a pod as the trainer uses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from services.common.adapters.names import AdapterVersion
from services.common.jobs.scorers.grants import Grants
from services.common.text.tokenizer import TextCodec
from services.engine.adapters.manager import AdapterManager
from services.engine.models.interface import CausalLM
from services.engine.models.training_arena import Arena
from services.pod.parts.runner import Gate
from services.pod.rollouts.source import EngineRollouts
from services.trainer.jobs.adapter_run import USUAL_TOKENS
from services.trainer.memory.budget import MemoryBudget
from services.trainer.memory.estimate import Workload, estimate

_MOST_FOR_GRAPHS = 0.75
"""Largest share of training's memory for graphs before a job is known: adapters and heads need some, too."""


@dataclass(frozen=True, slots=True)
class PodHost:
    """Policy host of a pod. Implements services.trainer.host.policy_host.PolicyHost."""

    model: CausalLM
    codec: TextCodec
    base_digest: str
    gate: Gate
    max_train_tokens: int
    max_lora_rank: int
    train_memory_bytes: int
    checkpoint: Path
    """Directory of the served checkpoint."""
    adapters: AdapterManager
    rollouts: EngineRollouts
    grants: Grants
    teacher: CausalLM | None = None
    memory_budget: MemoryBudget = field(init=False)
    """Memory budget of training: the holders of train_memory_bytes."""

    def __post_init__(self) -> None:
        memory = None
        if self.model.device.type == "cuda":
            usual = Workload(1, self.max_lora_rank, USUAL_TOKENS, self.model.dtype.itemsize, "none", fused=True)
            graphs = estimate(self.model.config, usual).captured
            fits = graphs <= _MOST_FOR_GRAPHS * self.train_memory_bytes
            memory = Arena(self.model.device, self.train_memory_bytes, graphs if fits else 0)
        object.__setattr__(self, "memory_budget", MemoryBudget(self.train_memory_bytes, memory))

    @property
    def drafter(self) -> str | None:
        """See services.trainer.host.policy_host.PolicyHost."""
        followed = self.adapters.drafter
        return None if followed is None else followed.name

    def checkpoint_drafter(self) -> Mapping[str, Tensor]:
        """See services.trainer.host.policy_host.PolicyHost."""
        return self.model.checkpoint_drafter(self.checkpoint)

    def adapter_files(self, version: AdapterVersion) -> Mapping[str, bytes]:
        """See services.trainer.host.policy_host.PolicyHost."""
        return self.adapters.files(version)

    def sync_adapters(self, version: AdapterVersion | None, timeout: float) -> None:
        """Reads the pointers now; returns once they are live and ``version`` is loaded.

        Raises:
            TemperError: the store is away, the version does not bind, or no slot became free in ``timeout`` seconds.
        """
        self.adapters.sync(version, timeout)

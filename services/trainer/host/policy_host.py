"""Interface of the engine that the trainer runs beside; the pod (services/pod) implements it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from services.common.adapters.names import AdapterVersion
from services.common.jobs.scorers.grants import Grants
from services.common.text.tokenizer import TextCodec
from services.engine.models.interface import CausalLM
from services.trainer.host.rollouts import RolloutSource
from services.trainer.memory.budget import MemoryBudget


class ComputeGate(Protocol):
    """Shares the device between decode steps and training slices."""

    def training(self) -> AbstractContextManager[None]:
        """Held while the trainer computes; entering waits for the engine's turn to end."""
        ...

    def give_way(self) -> None:
        """Called inside training() between layers: lets waiting engine steps run first, within the latency budget."""
        ...


class PolicyHost(Protocol):
    """The serving side of a pod, as the trainer sees it."""

    @property
    def model(self) -> CausalLM:
        """The one copy of the frozen weights."""
        ...

    @property
    def drafter(self) -> str | None:
        """Name of the drafter that the engine follows; None: it follows none."""
        ...

    def checkpoint_drafter(self) -> Mapping[str, Tensor]:
        """Tensors of the mtp layer of the served checkpoint, see CausalLM.checkpoint_drafter(), which says what is
        raised."""
        ...

    @property
    def teacher(self) -> CausalLM | None:
        """A second model with the same tokens on the same device, for distillation; None: the pod has none."""
        ...

    @property
    def codec(self) -> TextCodec: ...

    @property
    def base_digest(self) -> str: ...

    @property
    def gate(self) -> ComputeGate: ...

    @property
    def max_train_tokens(self) -> int:
        """The longest document that a job may train on, in tokens."""
        ...

    @property
    def max_lora_rank(self) -> int:
        """Rank of the engine's adapter slots; an adapter of a higher rank could be trained but never served."""
        ...

    @property
    def train_memory_bytes(self) -> int:
        """Bytes that the memory plan leaves for a job: adapter, gradients, optimizer and activations."""
        ...

    @property
    def rollouts(self) -> RolloutSource:
        """The engine as a sampler."""
        ...

    @property
    def grants(self) -> Grants:
        """What scorers of jobs may use."""
        ...

    @property
    def memory_budget(self) -> MemoryBudget:
        """Budget that tells which job or session holds how much of that memory."""
        ...

    def adapter_files(self, version: AdapterVersion) -> Mapping[str, bytes]:
        """A published version's files.

        Raises:
            ModelNotFound: there is no such version.
            AdapterRejected: its files are corrupt or belong to another base model.
            Unavailable: the object store does not answer.
        """
        ...

    def sync_adapters(self, version: AdapterVersion | None, timeout: float) -> None:
        """Makes the engine read the pointers now; returns once it serves them (and ``version`` is loadable)."""
        ...

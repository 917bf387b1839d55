"""Students: a forged checkpoint with what is trained of it, as float32 masters, and its weights as they are now."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from services.common.errors import CheckpointRejected
from services.common.jobs import LoraSettings
from services.engine.models.interface import CausalLM, Probe, Recompute
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.training_forward import TrainableForward
from services.forge.compaction import Base
from services.trainer.packing import Microbatch

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Plain floats by their names in safetensors."""


class Student(ABC):
    """A model in training. What it trains has the shapes of the checkpoint from the first to the last step.

    Args:
        base: the checkpoint's files.
        model: the same, loaded.
        names: canonical names of the tensors that change.
    """

    def __init__(self, base: Base, model: CausalLM, names: Sequence[str]) -> None:
        self.base, self.model, self.names = base, model, names

    @property
    @abstractmethod
    def parameters(self) -> list[Tensor]:
        """Masters that the optimizer steps on."""

    @abstractmethod
    def hidden(self, batch: Microbatch, give_way: Callable[[], None]) -> Tensor:
        """[N, hidden]: final hidden states of the rows whose next token is trained, differentiable in the masters."""

    @abstractmethod
    def weight(self, name: str) -> Tensor:
        """A changed tensor as it is now, float32 in the checkpoint's shape, on the model's device."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Copies of the masters on the CPU."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores state(). Raises ValueError: it is of other shapes."""

    @torch.no_grad()
    def current(self) -> CausalLM:
        """The model with its weights as they are now."""
        return self.model.with_weights({name: self.weight(name) for name in self.names})

    @torch.no_grad()
    def written(self) -> CausalLM:
        """The model with its weights as a checkpoint of the base's dtypes has them."""
        return self.model.with_weights({name: self.stored(name).float() for name in self.names})

    @torch.no_grad()
    def stored(self, name: str) -> Tensor:
        """weight() in the checkpoint's dtype.

        Raises:
            AssertionError: its shape is not the checkpoint's: something that was cut out has grown again.
        """
        header, _ = self.base.tensors[self.base.names[name]]
        weight = self.weight(name)
        if list(weight.shape) != list(header["shape"]):
            raise AssertionError(f"tensor {name} was {header['shape']} and is now {list(weight.shape)}")
        return weight.to(DTYPES[header["dtype"]])

    def _original(self, name: str) -> Tensor:
        """A tensor of the checkpoint, float32 on the model's device."""
        header, data = self.base.tensors[self.base.names[name]]
        if header["dtype"] not in DTYPES:
            raise CheckpointRejected(f"tensor {name} is {header['dtype']}: only plain floats can be trained")
        found = torch.frombuffer(bytearray(data), dtype=DTYPES[header["dtype"]]).view(header["shape"])
        return found.to(self.model.device, torch.float32)


class NeighbourStudent(Student):
    """Trains whole tensors. Its forward is plain torch on every device: kernels have no gradients for base weights."""

    def __init__(self, base: Base, model: CausalLM, names: Sequence[str], *, recompute: Recompute) -> None:
        super().__init__(base, model, names)
        self._recompute: Recompute = recompute
        self._masters = {name: self._original(name).requires_grad_() for name in names}

    @property
    def parameters(self) -> list[Tensor]:
        return list(self._masters.values())

    def hidden(self, batch: Microbatch, give_way: Callable[[], None]) -> Tensor:
        """See Student."""
        model = self.model.with_weights(self._masters)
        hidden = model.forward_probed(
            batch.token_ids, batch.lengths, Probe(), recompute=self._recompute, give_way=give_way
        )
        return hidden.index_select(0, batch.rows)

    def weight(self, name: str) -> Tensor:
        """See Student."""
        return self._masters[name].detach()

    def state(self) -> dict[str, Tensor]:
        """See Student."""
        return {name: master.detach().to("cpu", copy=True) for name, master in self._masters.items()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """See Student."""
        _check(state, self._masters)
        for name, master in self._masters.items():
            master.copy_(state[name])


class LoraStudent(Student):
    """Trains a low-rank update of each matrix by the trainer's forward, and adds it to the matrix at the end."""

    def __init__(self, base: Base, model: CausalLM, settings: LoraSettings, *, recompute: Recompute) -> None:
        self._lora = LoraParams.create(model.config, settings).on(model.device)
        super().__init__(base, model, [f"{path}.weight" for path in self._lora.targets])
        self._lora.link_gradients()
        self._forward = TrainableForward(model, self._lora, recompute)

    @property
    def parameters(self) -> list[Tensor]:
        return [self._lora.flat_a, self._lora.flat_b]

    def hidden(self, batch: Microbatch, give_way: Callable[[], None]) -> Tensor:
        """See Student."""
        return self._forward(batch.token_ids, batch.lengths, give_way).index_select(0, batch.rows)

    def weight(self, name: str) -> Tensor:
        """See Student. The product is in float64, so that what it adds does not depend on the order of sums."""
        target = self._lora.targets[name.removesuffix(".weight")]
        delta = target.scale * (target.b.detach().double() @ target.a.detach().double())
        return (self._original(name).double() + delta).float()

    def state(self) -> dict[str, Tensor]:
        """See Student."""
        return self._lora.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """See Student."""
        self._lora.load_state(state)


def _check(state: Mapping[str, Tensor], masters: Mapping[str, Tensor]) -> None:
    if state.keys() != masters.keys() or any(state[name].shape != masters[name].shape for name in masters):
        raise ValueError("the state is of other tensors than these")

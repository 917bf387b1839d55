"""Linear layers that an adapter may change, and where each lies in the fused projections."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from services.common.jobs.fields.lora import TARGET_MODULES as TARGET_MODULES
from services.engine.models.config import ModelConfig

LORA_GROUPS: tuple[str, ...] = ("in", "out", "gate_up", "down")
"""Names of a layer's groups of linear layers that share an input, see layer_groups()."""


@dataclass(frozen=True, slots=True)
class Target:
    """Linear layer inside a group of linear layers that share an input and one fused output."""

    module: str
    """Path inside the layer, e.g. "self_attn.q_proj"."""
    out_features: int
    offset: int
    """First column of its outputs in the fused output."""


@dataclass(frozen=True, slots=True)
class Group:
    """Linear layers that read the same input."""

    name: str
    in_features: int
    targets: tuple[Target, ...]

    @property
    def out_features(self) -> int:
        """Columns of the fused output."""
        return sum(target.out_features for target in self.targets)


@dataclass(frozen=True, slots=True)
class TargetBuffers:
    """The buffers that have one linear layer's adapter in every slot."""

    path: str
    """Path in the model, e.g. "layers.3.self_attn.q_proj"."""
    group: tuple[int, str]
    """Layer and group of linear layers."""
    a: Tensor
    """[slots, max_rank, in], the last dimension contiguous."""
    b: Tensor
    """[slots, max_rank, out], the last dimension contiguous: Bᵀ times the scale."""
    ordered: bool
    """True if b's columns are in the order of ModelConfig.output_order()."""


def layer_groups(config: ModelConfig, layer: int) -> tuple[Group, ...]:
    """The groups of a layer: "in" (the mixer's inputs), "out", "gate_up", "down"."""
    shapes = config.linear_shapes(layer)
    groups: list[Group] = []
    for name, modules in config.linear_groups(layer).items():
        targets: list[Target] = []
        offset = 0
        for module in modules:
            targets.append(Target(module, shapes[module][0], offset))
            offset += shapes[module][0]
        groups.append(Group(name, shapes[modules[0]][1], tuple(targets)))
    return tuple(groups)


def target_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """[out, in] of every linear layer by its path in the model, e.g. "layers.3.self_attn.q_proj"."""
    return {
        f"layers.{layer}.{module}": shape
        for layer in range(config.num_layers)
        for module, shape in config.linear_shapes(layer).items()
    }

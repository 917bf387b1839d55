"""A trainable adapter: float32 masters, their PEFT files, and their state for checkpoints."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from safetensors.torch import save as save_safetensors
from torch import Tensor

from services.common.errors import InvalidRequest
from services.common.jobs import LoraSettings
from services.engine.models.config import ModelConfig
from services.engine.models.lora.binding import (
    CONFIG_FILE,
    PEFT_PREFIX,
    WEIGHTS_FILE,
    BoundAdapter,
    lora_scale,
    name_targets,
)
from services.engine.models.lora.targets import target_shapes

_ORDER = (
    *("q_proj", "k_proj", "v_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    *("o_proj", "out_proj", "gate_proj", "up_proj", "down_proj"),
)
"""Linear layers as a layer computes them; those that share an input stand together, as in lora_targets.layer_groups."""


@dataclass(frozen=True, slots=True)
class TrainableTarget:
    """The adapter of one linear layer in training: y += scale · B (A x)."""

    a: Tensor
    """[rank, in] float32, requires grad."""
    b: Tensor
    """[out, rank] float32, requires grad."""
    alpha: float
    scale: float


class LoraParams:
    """The trainable tensors of one adapter, by path in the model ("layers.3.self_attn.q_proj").

    All masters lie in two tensors, those of A and those of B, in the order of `targets`: by layer and by the order in
    which a layer computes them, so that linear layers that share an input have their A in one piece.
    """

    def __init__(
        self,
        targets: Mapping[str, TrainableTarget],
        *,
        use_rslora: bool,
        target_modules: tuple[str, ...],
        module_prefix: str,
    ) -> None:
        paths = sorted(targets, key=_place)
        self.flat_a, a = _pack([targets[path].a for path in paths])
        """[numbers of all A] float32: the masters in `targets` are views of it, and once linked (link_gradients) their
        gradients are views of its gradient. What an optimizer steps on: two tensors instead of hundreds."""
        self.flat_b, b = _pack([targets[path].b for path in paths])
        self.targets = {
            path: TrainableTarget(first, second, targets[path].alpha, targets[path].scale)
            for path, first, second in zip(paths, a, b, strict=True)
        }
        self._layout = tuple(
            (path, tuple(target.a.shape), tuple(target.b.shape), target.scale) for path, target in self.targets.items()
        )
        self.module_prefix = module_prefix
        self.use_rslora = use_rslora
        self.target_modules = target_modules

    @property
    def rank(self) -> int:
        """The largest rank of any layer."""
        return max(target.a.shape[0] for target in self.targets.values())

    @property
    def layout(self) -> tuple[tuple[str, tuple[int, ...], tuple[int, ...], float], ...]:
        """Path, shapes of A and B, and scale of each linear layer: adapters that have it in common can be computed by
        the same kernels."""
        return self._layout

    @classmethod
    def create(cls, config: ModelConfig, settings: LoraSettings, *, device: torch.device | str = "cpu") -> LoraParams:
        """A new adapter that adds nothing yet: A uniform as in PEFT (Kaiming with a = √5, i.e. ± 1/√in), B zero.

        Raises:
            InvalidRequest: target_modules names a module that is no linear layer of the model.
        """
        shapes = target_shapes(config)
        asked = settings.target_modules
        known = {name for path in shapes for name in (path, path.rsplit(".", 1)[1])}
        names = known if asked is None or isinstance(asked, str) else set(asked)
        if unknown := sorted(names - known):
            modules = sorted({path.rsplit(".", 1)[1] for path in shapes})
            raise InvalidRequest(
                f"lora.target_modules: {', '.join(unknown)} of this model is no linear layer: choose from "
                f"{', '.join(modules)}, or leave it out for all",
                param="lora.target_modules",
            )
        chosen = [path for path in shapes if path in names or path.rsplit(".", 1)[1] in names]
        generator = torch.Generator().manual_seed(settings.seed)
        scale = lora_scale(settings.alpha, settings.rank, settings.use_rslora)
        targets: dict[str, TrainableTarget] = {}
        for path in chosen:
            out_features, in_features = shapes[path]
            bound = 1.0 / math.sqrt(in_features)
            a = torch.empty(settings.rank, in_features).uniform_(-bound, bound, generator=generator)
            b = torch.zeros(out_features, settings.rank)
            targets[path] = TrainableTarget(_master(a, device), _master(b, device), settings.alpha, scale)
        return cls(
            targets,
            use_rslora=settings.use_rslora,
            target_modules=name_targets(chosen, config),
            module_prefix=config.module_prefix,
        )

    @classmethod
    def from_bound(cls, bound: BoundAdapter, *, device: torch.device | str = "cpu") -> LoraParams:
        """Continues an adapter: the same ranks, scales and targets."""
        targets = {
            path: TrainableTarget(_master(t.a, device), _master(t.b, device), t.alpha, t.scale)
            for path, t in bound.targets.items()
        }
        return cls(
            targets,
            use_rslora=bound.use_rslora,
            target_modules=bound.target_modules,
            module_prefix=bound.module_prefix,
        )

    def on(self, device: torch.device) -> LoraParams:
        """Copy of the parameters on a device; the object itself if they are there. Gradients are not taken along."""
        return self if self.flat_a.device == device else self.copied(device)

    def copied(self, device: torch.device | str) -> LoraParams:
        """Copy of the parameters on a device, without their gradients."""
        targets = {
            path: TrainableTarget(_master(t.a, device), _master(t.b, device), t.alpha, t.scale)
            for path, t in self.targets.items()
        }
        return type(self)(
            targets,
            use_rslora=self.use_rslora,
            target_modules=self.target_modules,
            module_prefix=self.module_prefix,
        )

    def parameters(self) -> list[Tensor]:
        """All masters, in a fixed order: A then B of each layer."""
        return [tensor for target in self.targets.values() for tensor in (target.a, target.b)]

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        """(name as in state(), master), in the order of parameters()."""
        for path, target in self.targets.items():
            yield f"{path}.lora_A", target.a
            yield f"{path}.lora_B", target.b

    def link_gradients(self) -> None:
        """Makes every master's ``grad`` a view of the flat tensors' ``grad``, zeros where there was none: a backward
        that adds to either has added to both. Does nothing where that is so already."""
        for flat, leaves in ((self.flat_a, self.parameters()[::2]), (self.flat_b, self.parameters()[1::2])):
            sizes = [leaf.numel() for leaf in leaves]
            if flat.grad is not None and all(
                leaf.grad is not None and leaf.grad.data_ptr() == part.data_ptr()
                for leaf, part in zip(leaves, torch.split(flat.grad, sizes), strict=True)
            ):
                continue
            flat.grad = torch.zeros_like(flat)
            for leaf, part in zip(leaves, torch.split(flat.grad, sizes), strict=True):
                if leaf.grad is not None:
                    part.copy_(leaf.grad.flatten())
                leaf.grad = part.view_as(leaf)

    def slices(self) -> Iterator[tuple[slice, slice]]:
        """Slices of each target's A in flat_a and B in flat_b, in the order of `targets`."""
        a = b = 0
        for target in self.targets.values():
            yield slice(a, a + target.a.numel()), slice(b, b + target.b.numel())
            a, b = a + target.a.numel(), b + target.b.numel()

    def num_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.parameters())

    def state(self) -> dict[str, Tensor]:
        """Copies of the masters on the CPU."""
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.named_parameters()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores what state() gave.

        Raises:
            ValueError: it is the state of another adapter shape.
        """
        masters = dict(self.named_parameters())
        if masters.keys() != state.keys():
            raise ValueError(f"the state belongs to another adapter: {sorted(masters.keys() ^ state.keys())[:4]}")
        for name, tensor in masters.items():
            if tensor.shape != state[name].shape:
                raise ValueError(f"{name} is {list(state[name].shape)} in the state, {list(tensor.shape)} here")
            tensor.copy_(state[name])

    def to_files(self, base_model_name: str) -> dict[str, bytes]:
        """adapter_model.safetensors (float32) and adapter_config.json.

        The keys are those of the class that the base checkpoint names, so PEFT loads the files on it as they are.
        """
        prefix = PEFT_PREFIX + self.module_prefix
        tensors = {f"{prefix}{name}.weight": tensor.contiguous() for name, tensor in self.state().items()}
        ranks = {path: target.a.shape[0] for path, target in self.targets.items()}
        alphas = {path: target.alpha for path, target in self.targets.items()}
        rank, alpha = _most_common(ranks.values()), _most_common(alphas.values())
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model_name,
            "revision": None,
            "inference_mode": True,
            "r": rank,
            "lora_alpha": alpha,
            "lora_dropout": 0.0,
            "use_rslora": self.use_rslora,
            "use_dora": False,
            "target_modules": list(self.target_modules),
            "modules_to_save": None,
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "rank_pattern": {path: value for path, value in ranks.items() if value != rank},
            "alpha_pattern": {path: value for path, value in alphas.items() if value != alpha},
        }
        return {
            WEIGHTS_FILE: save_safetensors(tensors, metadata={"format": "pt"}),
            CONFIG_FILE: json.dumps(config, indent=2, sort_keys=True).encode(),
        }


def _master(tensor: Tensor, device: torch.device | str) -> Tensor:
    return tensor.detach().to(device, torch.float32, copy=True).requires_grad_()


def _pack(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Flat tensor with the numbers of all tensors, and leaves of their shapes that are views of it."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    parts = torch.split(flat.detach(), [tensor.numel() for tensor in tensors])
    leaves = [part.view_as(tensor).detach() for part, tensor in zip(parts, tensors, strict=True)]
    return flat, [leaf.requires_grad_() for leaf in leaves]


def _place(path: str) -> tuple[int, int, str]:
    """Sorts by layer, then in the order in which a layer computes."""
    _, layer, module = path.split(".", 2)
    name = module.rsplit(".", 1)[-1]
    return int(layer), _ORDER.index(name) if name in _ORDER else len(_ORDER), name


def _most_common(values: Iterable[float]) -> float:
    return Counter(values).most_common(1)[0][0]

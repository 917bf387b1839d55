"""The config of a Qwen3.5 checkpoint with a mixture of experts, every number read from its config.json. Without torch.

A layer's MLP is that of a dense model, the shared expert, whose output a gate scales for each token; and beside it some
of many small experts, which a router chooses.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from services.common.errors import CheckpointRejected
from services.engine.models.config import MlpNumbers, integer
from services.engine.models.qwen3_5.config import Qwen3_5Config

SHARED = "mlp.shared_expert."
"""Prefix of the shared expert's linear maps inside a layer."""
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
"""Tensors of all experts of a layer."""
_PARTS = {GATE_UP: ("gate_proj", "up_proj"), DOWN: ("down_proj",)}


@dataclass(frozen=True, slots=True)
class Qwen3_5MoeConfig(Qwen3_5Config):  # noqa: N801
    """Shape of a Qwen3.5 text model with experts in every layer; ``intermediate_size`` is the shared expert's.

    Raises:
        CheckpointRejected: the numbers contradict each other; the message names the key of config.json.
    """

    num_experts: int
    experts_per_token: int
    expert_size: int
    """Width of an expert between its two products."""
    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5_moe", "qwen3_5_moe_text")

    def __post_init__(self) -> None:
        Qwen3_5Config.__post_init__(self)
        if self.experts_per_token > self.num_experts:
            raise CheckpointRejected(
                f"config.json: num_experts_per_tok is {self.experts_per_token}, of num_experts={self.num_experts}"
            )

    def linear_groups(self, layer: int) -> dict[str, tuple[str, ...]]:
        """See ModelConfig."""
        mlp = {"gate_up": (f"{SHARED}gate_proj", f"{SHARED}up_proj"), "down": (f"{SHARED}down_proj",)}
        return Qwen3_5Config.linear_groups(self, layer) | mlp

    def mlp_linears(self) -> dict[str, tuple[int, int]]:
        """See Qwen3_5Config."""
        return {path.replace("mlp.", SHARED): shape for path, shape in Qwen3_5Config.mlp_linears(self).items()}

    def router_shapes(self) -> dict[str, tuple[int, ...]]:
        """See Qwen3_5Config."""
        return {
            "mlp.gate.weight": (self.num_experts, self.hidden_size),
            "mlp.shared_expert_gate.weight": (1, self.hidden_size),
        }

    def expert_shapes(self, layer: int) -> dict[str, tuple[int, int, int]]:  # noqa: ARG002
        """See ModelConfig."""
        return {
            GATE_UP: (self.num_experts, 2 * self.expert_size, self.hidden_size),
            DOWN: (self.num_experts, self.hidden_size, self.expert_size),
        }

    def mtp_expert_shapes(self) -> dict[str, tuple[int, int, int]]:
        """See ModelConfig."""
        return self.expert_shapes(0)

    def vector_bytes(self, itemsize: int) -> int:
        """See ModelConfig."""
        return Qwen3_5Config.vector_bytes(self, itemsize) + self.num_layers * self._router_bytes(itemsize)

    def mtp_vector_bytes(self, itemsize: int) -> int:
        """See ModelConfig."""
        return Qwen3_5Config.mtp_vector_bytes(self, itemsize) + self._router_bytes(itemsize)

    def as_stored(
        self, shapes: Mapping[str, tuple[int, ...]], names: Container[str | None]
    ) -> dict[str, tuple[int, ...]]:
        """See ModelConfig: checkpoints have a tensor of all experts, or each expert's own."""
        stored: dict[str, tuple[int, ...]] = {}
        for name, shape in shapes.items():
            single = {} if name in names else separate_experts(name, shape)
            stored |= single if single and next(iter(single)) in names else {name: shape}
        return stored

    def _router_bytes(self, itemsize: int) -> int:
        return (self.num_experts + 1) * self.hidden_size * itemsize

    def mlp_numbers(self) -> MlpNumbers:
        """See ModelConfig."""
        shared = Qwen3_5Config.mlp_numbers(self)
        count, width, hidden = self.experts_per_token, self.expert_size, self.hidden_size
        # Scores and probabilities, and the pairs of a token and an expert as numbers of 4 and 8 bytes.
        routed = 4 * self.num_experts + 12 * count
        return MlpNumbers(
            # Of each expert gate | up, the gate's activation, and the output before its weight.
            plain=shared.plain + self.intermediate_size + count * (hidden + 3 * width) + routed,
            inside=shared.inside + count * 2 * width + routed,
            backward=shared.backward + count * (3 * width + hidden),
        )

    def expert_outputs(self) -> int:
        """See ModelConfig."""
        return self.experts_per_token * max(self.hidden_size, 2 * self.expert_size)

    @classmethod
    def mlp_sizes(cls, text: Mapping[str, Any]) -> dict[str, int]:
        """See Qwen3_5Config."""
        if text.get("norm_topk_prob", True) is not True:
            raise CheckpointRejected(
                "config.json: norm_topk_prob=false is not supported: the experts' weights add to 1"
            )
        if text.get("mlp_only_layers") or text.get("decoder_sparse_step", 1) != 1:
            raise CheckpointRejected(
                "config.json: layers without experts (mlp_only_layers, decoder_sparse_step) are not supported"
            )
        return {
            "intermediate_size": integer(text, "shared_expert_intermediate_size"),
            "num_experts": integer(text, "num_experts"),
            "experts_per_token": integer(text, "num_experts_per_tok"),
            "expert_size": integer(text, "moe_intermediate_size"),
        }


def separate_experts(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Tensors of the single experts that checkpoints may have in place of one of all experts, in the order of its rows.

    Args:
        name: of any tensor; {} if it is not one of experts.
        shape: [experts, out, in].
    """
    for suffix, parts in _PARTS.items():
        if name.endswith(suffix):
            prefix, (count, rows, inputs) = name.removesuffix(suffix.rsplit(".", 1)[1]), shape
            one = (rows // len(parts), inputs)
            return {f"{prefix}{expert}.{part}.weight": one for expert in range(count) for part in parts}
    return {}

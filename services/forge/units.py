"""Units that can be cut out of a model, and where each of them lies in the tensors. Without torch.

Stock transformers has one number of KV groups, of DeltaNet key heads and of MLP channels a model. So each layer loses
as many of a kind as the others, but which ones is each layer's own. The layer that predicts the token after next (mtp)
has the widths of the others, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from services.common.errors import InvalidRequest
from services.engine.models.config import ModelConfig
from services.engine.models.qwen3_5.config import LayerType, Qwen3_5Config

Width: TypeAlias = Literal["kv_groups", "key_heads", "mlp_channels"]
"""Kinds of units inside layers: KV heads with their query heads, DeltaNet key heads with their value heads, channels
between the MLP's matrices."""
Kind: TypeAlias = Literal["layers", "kv_groups", "key_heads", "mlp_channels"]
WIDTHS: tuple[Width, ...] = get_args(Width)
KINDS: tuple[Kind, ...] = get_args(Kind)
OUTPUTS: dict[str, Width] = {
    "self_attn.o_proj": "kv_groups",
    "linear_attn.out_proj": "key_heads",
    "mlp.down_proj": "mlp_channels",
}
"""Output projections by module path inside a layer: a unit without its columns there says nothing."""
MTP_LAYER = "mtp.layers.0"
_CHANNELS = 128
"""What int4's groups and the float8 kernels take at a time."""
_FEW_CHANNELS = 16
"""What a matrix instruction takes at a time."""
_WIDE_MLP = 16 * _CHANNELS


@dataclass(frozen=True, slots=True)
class Part:
    """Place of the units of one kind in a tensor."""

    width: Width
    axis: int
    sizes: tuple[int, ...]
    """Rows or columns of a unit in each of the segments that lie one behind the other; a segment has all units in
    order."""


def cuttable(config: ModelConfig) -> Qwen3_5Config:
    """The config of a model that can be cut.

    Raises:
        InvalidRequest: it has experts or float8 matrices.
    """
    if type(config) is not Qwen3_5Config:
        raise InvalidRequest("a model with experts cannot be cut: take one of the dense Qwen3.5 models", param="model")
    if config.float8 is not None:
        raise InvalidRequest(
            "float8 matrices share scales between units and cannot be cut: take the bfloat16 checkpoint, and quantize "
            "what comes out of it",
            param="model",
        )
    return config


def count(config: Qwen3_5Config, kind: Kind) -> int:
    """Number of units of a kind: all layers, or those in one layer."""
    return {
        "layers": config.num_layers,
        "kv_groups": config.num_kv_heads,
        "key_heads": config.linear_key_heads,
        "mlp_channels": config.intermediate_size,
    }[kind]


def step(config: Qwen3_5Config, kind: Kind) -> int:
    """Number that what is left of a kind is a multiple of: MLP channels come 128 at a time, or 16 in MLPs of less than
    2048, which would otherwise have few widths to choose from."""
    if kind != "mlp_channels":
        return 1
    return _CHANNELS if config.intermediate_size >= _WIDE_MLP else _FEW_CHANNELS


def layer_path(index: int) -> str:
    """Path of a layer in canonical names."""
    return f"layers.{index}"


def places(config: Qwen3_5Config, width: Width, *, mtp: bool) -> tuple[str, ...]:
    """Paths of the layers that have units of a kind.

    Args:
        mtp: the checkpoint has the layer that predicts the token after next.
    """
    wanted: dict[Width, tuple[LayerType, ...]] = {
        "kv_groups": ("full_attention",),
        "key_heads": ("linear_attention",),
        "mlp_channels": ("full_attention", "linear_attention"),
    }
    found = [layer_path(index) for index, kind in enumerate(config.layer_types) if kind in wanted[width]]
    return (*found, MTP_LAYER) if mtp and width != "key_heads" else tuple(found)


def parts(config: Qwen3_5Config) -> dict[str, Part]:
    """Tensors that units lie in, by path inside a layer. All others (norms) have none."""
    heads, values = config.num_heads // config.num_kv_heads, config.linear_value_heads // config.linear_key_heads
    key, value, size = config.linear_key_dim, values * config.linear_value_dim, config.head_dim
    mixed = (key, key, value)
    return {
        # Each query head has its query rows, then its gate rows.
        "self_attn.q_proj.weight": Part("kv_groups", 0, (2 * heads * size,)),
        "self_attn.k_proj.weight": Part("kv_groups", 0, (size,)),
        "self_attn.v_proj.weight": Part("kv_groups", 0, (size,)),
        "self_attn.o_proj.weight": Part("kv_groups", 1, (heads * size,)),
        "linear_attn.in_proj_qkv.weight": Part("key_heads", 0, mixed),
        "linear_attn.conv1d.weight": Part("key_heads", 0, mixed),
        "linear_attn.in_proj_z.weight": Part("key_heads", 0, (value,)),
        "linear_attn.in_proj_b.weight": Part("key_heads", 0, (values,)),
        "linear_attn.in_proj_a.weight": Part("key_heads", 0, (values,)),
        "linear_attn.A_log": Part("key_heads", 0, (values,)),
        "linear_attn.dt_bias": Part("key_heads", 0, (values,)),
        "linear_attn.out_proj.weight": Part("key_heads", 1, (value,)),
        "mlp.gate_proj.weight": Part("mlp_channels", 0, (1,)),
        "mlp.up_proj.weight": Part("mlp_channels", 0, (1,)),
        "mlp.down_proj.weight": Part("mlp_channels", 1, (1,)),
    }


def indices(part: Part, units: int, kept: tuple[int, ...]) -> list[int]:
    """Rows or columns of the kept units.

    Args:
        units: in the tensor as it is.
    """
    found: list[int] = []
    begin = 0
    for size in part.sizes:
        for unit in kept:
            found.extend(range(begin + unit * size, begin + (unit + 1) * size))
        begin += units * size
    return found

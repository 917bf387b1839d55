"""The config of a Qwen3.5 checkpoint, every number read from its config.json. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from services.common.errors import CheckpointRejected
from services.engine.models.config import CacheLayout, ModelConfig, TrainingNumbers, integer, number, read_float8
from services.engine.models.qwen3_5.rope import Yarn, read_rope

LayerType = Literal["linear_attention", "full_attention"]
_LAYER_TYPES: tuple[LayerType, ...] = ("linear_attention", "full_attention")


@dataclass(frozen=True, slots=True)
class Qwen3_5Config(ModelConfig):  # noqa: N801
    """Shape of a Qwen3.5 text model.

    Raises:
        CheckpointRejected: the numbers contradict each other; the message names the key of config.json.
    """

    intermediate_size: int
    layer_types: tuple[LayerType, ...]
    rotary_dim: int
    rope_theta: float
    rms_norm_eps: float
    linear_key_heads: int
    linear_value_heads: int
    linear_key_dim: int
    linear_value_dim: int
    conv_kernel: int
    yarn: Yarn | None = field(default=None, kw_only=True)
    """How the context was lengthened; None: the rotation is plain."""
    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5", "qwen3_5_text")
    """Spellings of `model_type` that the class reads."""

    def __post_init__(self) -> None:
        def check(ok: bool, message: str) -> None:
            if not ok:
                raise CheckpointRejected(f"config.json: {message}")

        check(self.num_heads % self.num_kv_heads == 0, "num_attention_heads must be a multiple of num_key_value_heads")
        check(
            self.linear_value_heads % self.linear_key_heads == 0,
            "linear_num_value_heads must be a multiple of linear_num_key_heads",
        )
        check(self.conv_kernel >= 2, f"linear_conv_kernel_dim must be at least 2, got {self.conv_kernel}")
        check(
            0 < self.rotary_dim <= self.head_dim and self.rotary_dim % 2 == 0,
            f"partial_rotary_factor gives {self.rotary_dim} of {self.head_dim} rotary dimensions: not an even number",
        )

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def num_full_layers(self) -> int:
        return sum(kind == "full_attention" for kind in self.layer_types)

    @property
    def num_linear_layers(self) -> int:
        return self.num_layers - self.num_full_layers

    @property
    def key_size(self) -> int:
        """Width of all key (or query) heads of a DeltaNet layer."""
        return self.linear_key_heads * self.linear_key_dim

    @property
    def value_size(self) -> int:
        """Width of all value heads of a DeltaNet layer."""
        return self.linear_value_heads * self.linear_value_dim

    @property
    def conv_dim(self) -> int:
        """Channels of a DeltaNet layer's convolution: q | k | v."""
        return 2 * self.key_size + self.value_size

    @property
    def cache_layout(self) -> CacheLayout:
        return CacheLayout(
            kv_layers=self.num_full_layers,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            state_layers=self.num_linear_layers,
            conv_channels=self.conv_dim,
            conv_kernel=self.conv_kernel,
            state_heads=self.linear_value_heads,
            state_key_dim=self.linear_key_dim,
            state_value_dim=self.linear_value_dim,
        )

    def digested(self) -> dict[str, Any]:
        """See ModelConfig. YaRN lengthens the context of the same weights."""
        numbers = ModelConfig.digested(self)
        del numbers["yarn"]
        return numbers

    def rotation_identity(self) -> str:
        """See ModelConfig."""
        return "" if self.yarn is None else repr(self.yarn)

    def linear_groups(self, layer: int) -> dict[str, tuple[str, ...]]:
        """See ModelConfig."""
        if self.layer_types[layer] == "full_attention":
            return ModelConfig.linear_groups(self, layer)
        inputs = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        mixer = {"in": tuple(f"linear_attn.{name}" for name in inputs), "out": ("linear_attn.out_proj",)}
        return ModelConfig.linear_groups(self, layer) | mixer

    def output_order(self, module: str) -> tuple[int, ...] | None:
        """Rows of q_proj ([query | gate] of each head) are reordered: all gates, then all queries."""
        if module != "self_attn.q_proj":
            return None
        heads, size = range(self.num_heads), self.head_dim
        return tuple(
            row
            for half in (1, 0)
            for head in heads
            for row in range((2 * head + half) * size, (2 * head + half + 1) * size)
        )

    def vector_bytes(self, itemsize: int) -> int:
        """See ModelConfig."""
        delta_net = self.conv_dim * self.conv_kernel * itemsize
        delta_net += 4 * (2 * self.linear_value_heads + self.linear_value_dim)
        attention = 4 * (self.num_heads + self.num_kv_heads) * self.head_dim
        norms = 4 * self.hidden_size * (2 * self.num_layers + 1)
        return delta_net * self.num_linear_layers + attention * self.num_full_layers + norms

    def mtp_vector_bytes(self, itemsize: int) -> int:  # noqa: ARG002
        """See ModelConfig."""
        return 4 * (5 * self.hidden_size + (self.num_heads + self.num_kv_heads) * self.head_dim)

    def training_numbers(self, layer: int, *, chunk: int, tile: int) -> TrainingNumbers:
        """See ModelConfig."""
        heads, key, value = self.linear_value_heads, self.linear_key_dim, self.linear_value_dim
        wider = 4 * max(self.query_size, self.value_size)
        if self.layer_types[layer] == "full_attention":
            return TrainingNumbers(
                plain=(6 * self.query_size + 4 * self.kv_size, (5 * (self.query_size + self.kv_size)) // 4),
                inside=(self.query_size, self.num_heads),
                backward=wider + 2 * (self.query_size + self.kv_size),
                selective_keeps_inside=True,
            )
        # Queries, keys and values of each value head, the [chunk, chunk] matrices, the states between chunks.
        wide = heads * (5 * key + 5 * value + 15 * chunk // 2 + 2 * key * value // chunk)
        # The convolution's output, the recurrence's, what each token wrote, the tiles' matrices and their factors.
        inside = self.conv_dim + 2 * self.value_size + 2 * heads * tile + heads * key * value // tile
        return TrainingNumbers(
            plain=(self.conv_dim + 3 * self.value_size, wide + 6 * self.linear_key_heads * key),
            inside=(inside, 5 * heads),
            backward=wider + 2 * heads * key + self.conv_dim,
            selective_keeps_inside=False,
        )

    def linear_shapes(self, layer: int) -> dict[str, tuple[int, int]]:
        """Shapes [out, in] of a layer's linear maps by module path inside the layer, as transformers names them."""
        return self._linears(self.layer_types[layer])

    def _linears(self, kind: LayerType) -> dict[str, tuple[int, int]]:
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, int]]
        if kind == "full_attention":
            shapes = {
                "self_attn.q_proj": (2 * self.query_size, hidden),
                "self_attn.k_proj": (self.kv_size, hidden),
                "self_attn.v_proj": (self.kv_size, hidden),
                "self_attn.o_proj": (hidden, self.query_size),
            }
        else:
            shapes = {
                "linear_attn.in_proj_qkv": (self.conv_dim, hidden),
                "linear_attn.in_proj_z": (self.value_size, hidden),
                "linear_attn.in_proj_b": (self.linear_value_heads, hidden),
                "linear_attn.in_proj_a": (self.linear_value_heads, hidden),
                "linear_attn.out_proj": (hidden, self.value_size),
            }
        return shapes | self.mlp_linears()

    def mlp_linears(self) -> dict[str, tuple[int, int]]:
        """Shapes [out, in] of the linear maps of the MLP that every token passes, by module path inside a layer."""
        hidden, width = self.hidden_size, self.intermediate_size
        return {"mlp.gate_proj": (width, hidden), "mlp.up_proj": (width, hidden), "mlp.down_proj": (hidden, width)}

    def router_shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensors of a layer's MLP, but for its linear maps and experts."""
        return {}

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of a checkpoint without its prefix ("embed_tokens.weight", "layers.0.…", "lm_head.weight")."""
        shapes: dict[str, tuple[int, ...]] = {
            "embed_tokens.weight": (self.vocab_size, self.hidden_size),
            "norm.weight": (self.hidden_size,),
        }
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        for index, kind in enumerate(self.layer_types):
            shapes |= {f"layers.{index}.{name}": shape for name, shape in self._layer_shapes(kind).items()}
        return shapes

    def mtp_linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Shapes [out, in] of the linear maps of the layer that predicts the token after next."""
        linears = {f"layers.0.{path}": shape for path, shape in self._linears("full_attention").items()}
        return {"fc": (self.hidden_size, 2 * self.hidden_size)} | linears

    def mtp_shapes(self) -> dict[str, tuple[int, ...]]:
        """See ModelConfig."""
        shapes: dict[str, tuple[int, ...]] = {
            "mtp.fc.weight": (self.hidden_size, 2 * self.hidden_size),
            "mtp.norm.weight": (self.hidden_size,),
            "mtp.pre_fc_norm_embedding.weight": (self.hidden_size,),
            "mtp.pre_fc_norm_hidden.weight": (self.hidden_size,),
        }
        return shapes | {f"mtp.layers.0.{name}": size for name, size in self._layer_shapes("full_attention").items()}

    def _layer_shapes(self, kind: LayerType) -> dict[str, tuple[int, ...]]:
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (self.hidden_size,),
            "post_attention_layernorm.weight": (self.hidden_size,),
        }
        layer |= {f"{path}.weight": shape for path, shape in self._linears(kind).items()}
        layer |= self.router_shapes() | self.expert_shapes(0)
        if kind == "full_attention":
            return layer | {"self_attn.q_norm.weight": (self.head_dim,), "self_attn.k_norm.weight": (self.head_dim,)}
        return layer | {
            "linear_attn.conv1d.weight": (self.conv_dim, 1, self.conv_kernel),
            "linear_attn.A_log": (self.linear_value_heads,),
            "linear_attn.dt_bias": (self.linear_value_heads,),
            "linear_attn.norm.weight": (self.linear_value_dim,),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Reads a parsed config.json, flat (text model) or with a nested text_config (multimodal model).

        Raises:
            CheckpointRejected: a missing or malformed key, or an architecture that this model is not.
        """
        text = data.get("text_config", data)
        if not isinstance(text, Mapping):
            raise CheckpointRejected("config.json: text_config is not an object")
        _refuse_foreign(data, text, cls.model_types)
        layer_types = _layer_types(text)
        hidden, heads = integer(text, "hidden_size"), integer(text, "num_attention_heads")
        head_dim = integer(text, "head_dim") if text.get("head_dim") is not None else hidden // heads
        rope = read_rope(text)
        tied = text.get("tie_word_embeddings", data.get("tie_word_embeddings", False))
        if "text_config" in data and "tie_word_embeddings" in data:
            tied = data["tie_word_embeddings"]
        if not isinstance(tied, bool):
            raise CheckpointRejected(f"config.json: tie_word_embeddings must be true or false, got {tied!r}")
        return cls(
            module_prefix="model.language_model." if "text_config" in data else "model.",
            vocab_size=integer(text, "vocab_size"),
            hidden_size=hidden,
            layer_types=layer_types,
            num_heads=heads,
            num_kv_heads=integer(text, "num_key_value_heads"),
            head_dim=head_dim,
            rotary_dim=int(head_dim * rope.partial),
            rope_theta=rope.theta,
            rms_norm_eps=number(text, "rms_norm_eps"),
            linear_key_heads=integer(text, "linear_num_key_heads"),
            linear_value_heads=integer(text, "linear_num_value_heads"),
            linear_key_dim=integer(text, "linear_key_head_dim"),
            linear_value_dim=integer(text, "linear_value_head_dim"),
            conv_kernel=integer(text, "linear_conv_kernel_dim"),
            max_position_embeddings=rope.max_position_embeddings,
            tie_word_embeddings=tied,
            original_max_position_embeddings=rope.original_max_position_embeddings,
            yarn=rope.yarn,
            float8=read_float8(data) or read_float8(text),
            **cls.mlp_sizes(text),
        )

    @classmethod
    def mlp_sizes(cls, text: Mapping[str, Any]) -> dict[str, int]:
        """Fields that describe the MLP, by name. Raises CheckpointRejected."""
        return {"intermediate_size": integer(text, "intermediate_size")}


def _layer_types(text: Mapping[str, Any]) -> tuple[LayerType, ...]:
    count = integer(text, "num_hidden_layers")
    given = text.get("layer_types")
    if given is None:
        interval = integer(text, "full_attention_interval") if "full_attention_interval" in text else 4
        return tuple("linear_attention" if (i + 1) % interval else "full_attention" for i in range(count))
    if not isinstance(given, list) or len(given) != count or any(kind not in _LAYER_TYPES for kind in given):
        raise CheckpointRejected(
            f"config.json: layer_types must list num_hidden_layers={count} entries, each one of {list(_LAYER_TYPES)}"
        )
    return tuple(given)


def _refuse_foreign(data: Mapping[str, Any], text: Mapping[str, Any], kinds: tuple[str, ...]) -> None:
    kind = text.get("model_type", data.get("model_type"))
    if kind not in kinds:
        raise CheckpointRejected(f"config.json: model_type {kind!r} is neither {' nor '.join(kinds)}")
    if text.get("attention_bias"):
        raise CheckpointRejected("config.json: attention_bias=true is not supported")
    if text.get("attn_output_gate", True) is not True:
        raise CheckpointRejected("config.json: attn_output_gate=false is not supported")
    if text.get("hidden_act", "silu") != "silu":
        raise CheckpointRejected(f"config.json: hidden_act {text['hidden_act']!r} is not supported, only 'silu' is")

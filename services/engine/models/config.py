"""Architecture of a checkpoint as config.json has it: what engine, pod and trainer know before anything is loaded.

An architecture implements ModelConfig and services.engine.models.interface.CausalLM, and has its line in
services.engine.models.registry. Without torch: what fetches a model reads configs too.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from services.common.adapters.drafter_form import DrafterForm
from services.common.errors import CheckpointRejected

MTP_LAYER = "mtp.layers.0."
"""Prefix of the tensors of the mtp layer's one decoder layer."""
MTP_PLACES = "mtp.places.weight"
"""Tensor of a block drafter that the mtp layer has not."""

_FLOAT8 = 'only quant_method "fp8" (e4m3, activation_scheme "dynamic") is; take the bfloat16 checkpoint'


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Shape of what a sequence leaves in the caches: paged keys and values, and a state of a fixed size."""

    kv_layers: int
    """Layers with keys and values."""
    kv_heads: int
    head_dim: int
    state_layers: int = 0
    """Layers with a convolution and a recurrent state; 0: the model is all attention."""
    conv_channels: int = 0
    conv_kernel: int = 1
    state_heads: int = 0
    state_key_dim: int = 0
    state_value_dim: int = 0


@dataclass(frozen=True, slots=True)
class TrainingNumbers:
    """Numbers a token that one layer's mixer takes in a training step, (of the model's dtype, float32)."""

    plain: tuple[int, int]
    """Numbers that torch's autograd keeps of the layer."""
    inside: tuple[int, int]
    """Numbers that the forward on a GPU keeps between the mixer's projections."""
    backward: int
    """Numbers of scratch memory of the backward on a GPU beside the projections' outputs, of the model's dtype."""
    selective_keeps_inside: bool
    """True if recompute="selective" keeps ``inside``."""


@dataclass(frozen=True, slots=True)
class MlpNumbers:
    """Numbers a token, of the model's dtype, that one layer's MLP takes in a training step."""

    plain: int
    """Numbers that torch's autograd keeps of it."""
    inside: int
    """Numbers that the forward on a GPU keeps between its projections, if it keeps them."""
    backward: int
    """Numbers of scratch memory of the backward on a GPU."""


@dataclass(frozen=True, slots=True)
class Float8Scales:
    """Layout of the scales beside float8 matrices: ``W = values · scale``."""

    block: tuple[int, int] | None
    """Rows and columns of a matrix that share a scale; None: each row has a scale, or all rows share one."""

    def shapes(self, matrix: Sequence[int]) -> list[tuple[int, ...]]:
        """Shapes that the scales of a matrix [..., out, in] may have."""
        *stacked, rows, columns = matrix
        if self.block is None:
            return [(*stacked, rows, 1), (*stacked, rows), (*stacked, 1), tuple(stacked)]
        return [(*stacked, -(-rows // self.block[0]), -(-columns // self.block[1]))]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(ABC):
    """Numbers of one checkpoint, of whichever architecture. Every number is read from config.json.

    The defaults are those of a dense transformer whose modules have the usual names.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    module_prefix: Literal["model.", "model.language_model."] = "model."
    """Prefix of the text model in the class that config.json names: PEFT writes it into every adapter's keys. It is
    not part of the checkpoint's digest: the same weights take the same adapters."""
    original_max_position_embeddings: int | None = None
    """The context that the checkpoint had before it was lengthened, where config.json says so: in its digest it stands
    in the place of max_position_embeddings, because the same weights take the adapters that they took before."""
    float8: Float8Scales | None = None
    """Scales of the checkpoint's float8 matrices; None: it has none."""

    @classmethod
    @abstractmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelConfig:
        """Reads a parsed config.json.

        Raises:
            CheckpointRejected: a missing or malformed key, or something that the architecture does not support.
        """

    def digested(self) -> dict[str, Any]:
        """Numbers that the checkpoint's digest contains: all but those that the same weights, and adapters for them,
        may have otherwise."""
        numbers = asdict(self)
        del numbers["module_prefix"]
        original = numbers.pop("original_max_position_embeddings")
        numbers["max_position_embeddings"] = original or self.max_position_embeddings
        if self.float8 is None:
            del numbers["float8"]  # as before there was such a field
        return numbers

    def rotation_identity(self) -> str:
        """What keys depend on, of that which the digest leaves out; empty: nothing."""
        return ""

    @property
    @abstractmethod
    def num_layers(self) -> int: ...

    @property
    def query_size(self) -> int:
        """Width of all query heads of an attention layer."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads of an attention layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def cache_layout(self) -> CacheLayout:
        """Sizes of what a sequence leaves in the caches."""
        return CacheLayout(self.num_layers, self.num_kv_heads, self.head_dim)

    @abstractmethod
    def linear_shapes(self, layer: int) -> dict[str, tuple[int, int]]:
        """Shapes [out, in] of a layer's linear maps by module path inside the layer, as transformers names them: what
        an adapter may change."""

    def linear_groups(self, layer: int) -> dict[str, tuple[str, ...]]:  # noqa: ARG002
        """Linear maps of a layer that read the same input and are fused, in the order of the fused outputs.

        Returns:
            For "in" (the mixer's inputs), "out", "gate_up" and "down" each the module paths.
        """
        return {
            "in": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "out": ("self_attn.o_proj",),
            "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
            "down": ("mlp.down_proj",),
        }

    def output_order(self, module: str) -> tuple[int, ...] | None:  # noqa: ARG002
        """Order of a module's rows in the fused projection: the row of the checkpoint that each is. None: they lie as
        in the checkpoint. Only one module of a model may have such an order."""
        return None

    def expert_shapes(self, layer: int) -> dict[str, tuple[int, int, int]]:  # noqa: ARG002
        """Shapes [experts, out, in] of a layer's experts by module path inside the layer, {} if it has none. An adapter
        does not change them."""
        return {}

    @abstractmethod
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of a checkpoint without its prefix ("embed_tokens.weight", "layers.0.…", "lm_head.weight")."""

    def as_stored(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        names: Container[str | None],  # noqa: ARG002
    ) -> dict[str, tuple[int, ...]]:
        """Tensors of tensor_shapes() as a checkpoint has them, where they may be cut up in one way or another.

        Args:
            names: of the checkpoint's tensors.
        """
        return dict(shapes)

    def parameters(self) -> int:
        """Parameters of the text model, a tied head counted once."""
        return sum(math.prod(shape) for shape in self.tensor_shapes().values())

    def vector_bytes(self, itemsize: int) -> int:  # noqa: ARG002
        """Bytes of all weights but the linear maps, experts, the embedding and the head. Norms are kept in float32."""
        matrices = {f"layers.{n}.{path}.weight" for n in range(self.num_layers) for path in self.linear_shapes(n)}
        matrices |= {"embed_tokens.weight", "lm_head.weight"}
        return 4 * sum(math.prod(shape) for name, shape in self.tensor_shapes().items() if name not in matrices)

    def mtp_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the layer that predicts the token after next, with its "mtp." prefix; {}: there is none."""
        return {}

    def drafter_shapes(self, form: DrafterForm) -> dict[str, tuple[int, ...]]:
        """Every tensor of a drafter of this form; {}: the architecture has none. A block drafter has several layers as
        the mtp layer's, and a vector for each place but the first one."""
        shapes = dict(self.mtp_shapes())
        if shapes and form.block:
            layer = {name: shape for name, shape in shapes.items() if name.startswith(MTP_LAYER)}
            for index in range(1, form.layers):
                shapes |= {name.replace(MTP_LAYER, f"mtp.layers.{index}."): shape for name, shape in layer.items()}
            shapes[MTP_PLACES] = (form.block - 1, self.hidden_size)
        return shapes

    def mtp_linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Shapes [out, in] of the linear maps of the layer that predicts the token after next; {}: there is none."""
        return {}

    def mtp_expert_shapes(self) -> dict[str, tuple[int, int, int]]:
        """Shapes [experts, out, in] of that layer's experts."""
        return {}

    def mtp_vector_bytes(self, itemsize: int) -> int:  # noqa: ARG002
        """Bytes of that layer's other weights."""
        return 0

    def training_numbers(self, layer: int, *, chunk: int, tile: int) -> TrainingNumbers:  # noqa: ARG002
        """Memory of a layer's mixer in training.

        Args:
            chunk, tile: tokens that a recurrent layer takes at a time, in plain torch and on a GPU.
        """
        queries, keys = self.query_size, self.kv_size
        return TrainingNumbers(
            plain=(6 * queries + 4 * keys, (5 * (queries + keys)) // 4),
            inside=(queries, self.num_heads),
            backward=4 * queries + 2 * (queries + keys),
            selective_keeps_inside=True,
        )

    def mlp_numbers(self) -> MlpNumbers:
        """Memory of a layer's MLP in training."""
        width = self.intermediate_size
        return MlpNumbers(plain=4 * width, inside=2 * width, backward=2 * width + 4 * self.hidden_size)

    def expert_outputs(self) -> int:
        """Numbers a token that its experts give before they are added up, in serving; 0: there are none."""
        return 0


def read_float8(data: Mapping[str, Any]) -> Float8Scales | None:
    """Reads quantization_config of a parsed config.json; None: it has none.

    ``modules_to_not_convert`` plays no part: whether a tensor is float8 says the tensor itself. Matching names against
    that list has gone wrong elsewhere: "mlp.gate" is not "mlp.gate_proj".

    Raises:
        CheckpointRejected: weights are stored in a way that is not supported.
    """
    given = data.get("quantization_config")
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise CheckpointRejected("config.json: quantization_config is not an object")
    for key, allowed in (("quant_method", ("fp8",)), ("fmt", (None, "e4m3")), ("activation_scheme", (None, "dynamic"))):
        if given.get(key) not in allowed:
            raise CheckpointRejected(
                f"config.json: quantization_config.{key} {given.get(key)!r} is not supported, {_FLOAT8}"
            )
    block = given.get("weight_block_size")
    if block is None:
        return Float8Scales(None)
    if not isinstance(block, list) or len(block) != 2 or any(type(size) is not int or size < 1 for size in block):
        raise CheckpointRejected(
            f"config.json: quantization_config.weight_block_size must be two positive integers, got {block!r}"
        )
    return Float8Scales((block[0], block[1]))


def require(text: Mapping[str, Any], key: str) -> Any:
    """A key of config.json that must be there. Raises CheckpointRejected."""
    if text.get(key) is None:
        raise CheckpointRejected(f"config.json: {key} is missing")
    return text[key]


def integer(text: Mapping[str, Any], key: str) -> int:
    """A positive integer of config.json. Raises CheckpointRejected."""
    value = require(text, key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointRejected(f"config.json: {key} must be a positive integer, got {value!r}")
    return value


def number(text: Mapping[str, Any], key: str) -> float:
    """A positive number of config.json. Raises CheckpointRejected."""
    value = require(text, key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise CheckpointRejected(f"config.json: {key} must be a positive number, got {value!r}")
    return float(value)

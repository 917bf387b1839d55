"""A drafter's tensors by canonical name, the mtp layer's among them: read from a checkpoint, made into weights, and
written over those that are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from kernels.quantize import multiply_groups
from services.common.errors import AdapterRejected, InvalidRequest
from services.engine.models.checkpoint import MTP_PREFIX, raw_tensors, shard_files
from services.engine.models.config import MTP_PLACES
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.qwen3_5.loading.tensors import CheckpointTensors
from services.engine.models.qwen3_5.moe_config import DOWN, GATE_UP, Qwen3_5MoeConfig, separate_experts
from services.engine.models.qwen3_5.weights import AttentionWeights, ExpertWeights, LayerWeights, MtpWeights
from services.engine.models.weights.matrix import DenseMatrix, Fp8Matrix, Int4Matrix, Matrix, quantize

_ROUTER = ("mlp.gate.weight", "mlp.shared_expert_gate.weight")


def built(config: Qwen3_5Config, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> MtpWeights:
    """Weights of these tensors, dense, and differentiable in them.

    Args:
        tensors: all of config.drafter_shapes(), on one device.
        dtype: of the matrices.
    """
    places = tensors.get(MTP_PLACES)
    count = len({name.split(".")[2] for name in tensors if name.startswith("mtp.layers.")})
    return MtpWeights(
        embedding_norm=_norm(tensors, "mtp.pre_fc_norm_embedding.weight"),
        hidden_norm=_norm(tensors, "mtp.pre_fc_norm_hidden.weight"),
        fc=DenseMatrix(tensors["mtp.fc.weight"].to(dtype)),
        layers=tuple(_layer(config, tensors, dtype, f"mtp.layers.{index}.") for index in range(count)),
        final_norm=_norm(tensors, "mtp.norm.weight"),
        places=None if places is None else places.to(dtype),
    )


def _norm(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    return 1.0 + tensors[name].float()


def _layer(config: Qwen3_5Config, tensors: Mapping[str, Tensor], dtype: torch.dtype, prefix: str) -> LayerWeights:
    """Weights of the decoder layer whose tensors have this prefix."""

    def matrix(*names: str) -> DenseMatrix:
        parts = [tensors[name].to(dtype).flatten(0, -2) for name in names]
        return DenseMatrix(parts[0] if len(parts) == 1 else torch.cat(parts))

    def group(name: str) -> DenseMatrix:
        parts = []
        for module in groups[name]:
            part = tensors[f"{prefix}{module}.weight"]
            order = config.output_order(module)
            rows = part if order is None else part.index_select(0, torch.tensor(order, device=part.device))
            parts.append(rows.to(dtype))
        return DenseMatrix(parts[0] if len(parts) == 1 else torch.cat(parts))

    groups = config.linear_groups(_full(config))
    experts = None
    if isinstance(config, Qwen3_5MoeConfig):
        experts = ExpertWeights(
            count=config.num_experts,
            per_token=config.experts_per_token,
            router=matrix(*(prefix + name for name in _ROUTER)),
            gate_up=matrix(prefix + GATE_UP),
            down=matrix(prefix + DOWN),
        )
    qk_norm = [
        _norm(tensors, f"{prefix}self_attn.{name}.weight").expand(count, -1)
        for name, count in (("q_norm", config.num_heads), ("k_norm", config.num_kv_heads))
    ]
    return LayerWeights(
        input_norm=_norm(tensors, prefix + "input_layernorm.weight"),
        mixer=AttentionWeights(group("in"), torch.cat(qk_norm), group("out")),
        post_norm=_norm(tensors, prefix + "post_attention_layernorm.weight"),
        gate_up=group("gate_up"),
        down=group("down"),
        experts=experts,
    )


def read_from_checkpoint(config: Qwen3_5Config, path: Path) -> dict[str, Tensor]:
    """See CausalLM.checkpoint_drafter()."""
    shapes = config.mtp_shapes()
    with ExitStack() as stack:
        names = (name for file in shard_files(path) for name, _, _ in raw_tensors(file, stack))
        if not any(name.startswith(MTP_PREFIX) for name in names):
            raise InvalidRequest(
                "the checkpoint has no mtp layer to begin with: give start_from, a drafter of this model",
                param="start_from",
            )
        stored = CheckpointTensors(path, stack, config, config.tensor_shapes() | shapes, mtp=True)

        def read(name: str) -> Tensor:
            tensor, scales = stored.read(name).to(torch.float32, copy=True), stored.scales(name)
            if scales is not None:
                multiply_groups(tensor.flatten(0, -2), scales.values, scales.width)
            return tensor

        found = {}
        for name, shape in shapes.items():
            parts = [name] if name in stored.shapes else list(separate_experts(name, shape))
            found[name] = torch.cat([read(part) for part in parts]).view(shape)
        return found


def staged(config: Qwen3_5Config, weights: MtpWeights, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
    """Makes everything ready to write a drafter over the one that is loaded.

    Their tensors stay where they are, so what was captured reads the new ones. All work but the copies is done here, on
    the host: beside a model that serves, the device may have no room for a second layer.

    Args:
        tensors: on the CPU.

    Returns:
        Function that copies, on the current stream, without waiting for the device.

    Raises:
        AdapterRejected: it is of another form.
    """
    with torch.inference_mode():
        new = built(config, tensors, _dtype(weights.fc))
        if new.form != weights.form:
            raise AdapterRejected(
                f"the drafter is {new.form}, and this engine has room and steps for {weights.form}: start it again, "
                "with TEMPER_DRAFTER naming a drafter of the form that is to draft",
                param="drafter",
            )
        matrices = zip(_matrices(new), _matrices(weights), strict=True)
        alike = [quantize(matrix.dense(), _kind(place)) for matrix, place in matrices]
        pairs = list(
            zip(
                [*_norms(weights), *_tensors(_matrices(weights))],
                [*_norms(new), *_tensors(alike)],
                strict=True,
            )
        )
    pinned = weights.final_norm.device.type == "cuda"
    ready = [(place, new.contiguous().pin_memory() if pinned else new) for place, new in pairs]

    @torch.inference_mode()
    def write() -> None:
        for place, new in ready:
            place.copy_(new, non_blocking=True)

    return write


def _full(config: Qwen3_5Config) -> int:
    """A layer whose linear maps are fused as the mtp layer's."""
    return config.layer_types.index("full_attention")


def _attention(layer: LayerWeights) -> AttentionWeights:
    if not isinstance(layer.mixer, AttentionWeights):
        raise TypeError("the mtp layer is one of full attention")
    return layer.mixer


def _matrices(weights: MtpWeights) -> list[Matrix]:
    found: list[Matrix] = [weights.fc]
    for layer in weights.layers:
        found += [layer.mixer.in_proj, layer.mixer.out_proj, layer.gate_up, layer.down]
        if layer.experts is not None:
            found += [layer.experts.router, layer.experts.gate_up, layer.experts.down]
    return found


def _norms(weights: MtpWeights) -> list[Tensor]:
    """All that is no matrix of a product."""
    found = [weights.embedding_norm, weights.hidden_norm, weights.final_norm]
    found += [] if weights.places is None else [weights.places]
    for layer in weights.layers:
        found += [layer.input_norm, layer.post_norm, _attention(layer).qk_norm]
    return found


def _tensors(matrices: Sequence[Matrix]) -> list[Tensor]:
    """What the matrices are stored in, one behind the other."""
    found: list[Tensor] = []
    for matrix in matrices:
        found += [matrix.weight] if isinstance(matrix.weight, Tensor) else matrix.weight.tensors()
    return found


def _kind(matrix: Matrix) -> str:
    return {Fp8Matrix: "fp8", Int4Matrix: "int4"}.get(type(matrix), "none")


def _dtype(matrix: Matrix) -> torch.dtype:
    """The model's."""
    if isinstance(matrix, Fp8Matrix | Int4Matrix):
        return matrix.dtype
    return matrix.dense().dtype

"""The architectures that checkpoints may have, one line each.

An architecture is a config (services.engine.models.config.ModelConfig) and a model
(services.engine.models.interface.CausalLM). Both are named and imported when a checkpoint asks for them, so that who
reads a config needs no torch. One module may have both; where services/model_source is to fetch such checkpoints,
the config's module must do without torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from services.common.adapters.drafter_form import MTP_FORM, DrafterForm
from services.common.errors import CheckpointRejected
from services.engine.models.config import ModelConfig

if TYPE_CHECKING:
    import torch

    from kernels.gpu.configs import KernelConfigs
    from services.engine.models.footprint import Storage
    from services.engine.models.interface import CausalLM


class Architecture(NamedTuple):
    """Classes of an architecture, each as "module:class"."""

    config: str
    model: str


_QWEN3_5 = Architecture(
    "services.engine.models.qwen3_5.config:Qwen3_5Config", "services.engine.models.qwen3_5.model:Qwen3_5"
)
_QWEN3_5_MOE = Architecture("services.engine.models.qwen3_5.moe_config:Qwen3_5MoeConfig", _QWEN3_5.model)

ARCHITECTURES: dict[str, Architecture] = {
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5_MOE,
}
"""Architectures by an entry of `architectures` in config.json."""
_MODEL_TYPES: dict[str, str] = {
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
}
"""Entries of `architectures` by `model_type`, for a config.json whose `architectures` names none of them."""


def find_architecture(data: Mapping[str, Any]) -> Architecture:
    """The architecture of a parsed config.json.

    Raises:
        CheckpointRejected: it is not one of these.
    """
    named = data.get("architectures")
    for name in named if isinstance(named, list) else ():
        if isinstance(name, str) and name in ARCHITECTURES:
            return ARCHITECTURES[name]
    text = data.get("text_config")
    kind = text.get("model_type", data.get("model_type")) if isinstance(text, Mapping) else data.get("model_type")
    if isinstance(kind, str) and kind in _MODEL_TYPES:
        return ARCHITECTURES[_MODEL_TYPES[kind]]
    raise CheckpointRejected(
        f"config.json: architectures {named!r} with model_type {kind!r} is not supported, only "
        f"{', '.join(sorted(ARCHITECTURES))} are"
    )


def read_config(path: str | Path) -> ModelConfig:
    """Reads ``path/config.json``.

    Raises:
        CheckpointRejected: no or malformed file, a missing key, or an architecture that is not supported.
    """
    return parse_config(read_config_file(path))


def parse_config(data: Mapping[str, Any]) -> ModelConfig:
    """Reads a parsed config.json. Raises CheckpointRejected."""
    return cast(type[ModelConfig], _class(find_architecture(data).config)).from_dict(data)


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype | str,
    device: torch.device | str,
    storage: Storage | None = None,
    mtp: bool = False,
    form: DrafterForm = MTP_FORM,
    kernels: KernelConfigs | None = None,
) -> CausalLM:
    """Loads a checkpoint directory (config.json and safetensors).

    Args:
        dtype: a torch dtype or a name for resolve_dtype().
        storage: quantization of the weight matrices; None: none.
        mtp: load the layer that predicts the token after next, too.
        form: of the drafter that will be written over it: there is room for its layers and places.
        kernels: configurations of the GPU's kernels; None: those that fit the device.

    Raises:
        InvalidRequest: the shapes cannot be quantized so.
        CheckpointRejected: the directory is not a complete checkpoint of a supported architecture.
    """
    from services.engine.models.footprint import PLAIN
    from services.engine.models.interface import resolve_dtype

    chosen = resolve_dtype(dtype, device) if isinstance(dtype, str) else dtype
    model = cast("type[CausalLM]", _class(find_architecture(read_config_file(path)).model))
    return model.load(path, read_config(path), chosen, device, storage or PLAIN, mtp=mtp, form=form, kernels=kernels)


def _class(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def read_config_file(path: str | Path) -> dict[str, Any]:
    """A checkpoint directory's config.json, parsed. Raises CheckpointRejected."""
    file = Path(path) / "config.json"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointRejected(f"{file} does not exist: the model directory needs a config.json") from error
    except (OSError, ValueError) as error:
        raise CheckpointRejected(f"{file} is not readable JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointRejected(f"{file} is not a JSON object")
    return data

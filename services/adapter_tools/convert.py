"""Between the two forms of PEFT's keys, for the two classes that load a Qwen3.5 checkpoint.

text        base_model.model.model.layers.…                  Qwen3_5ForCausalLM (AutoModelForCausalLM)
multimodal  base_model.model.model.language_model.layers.…   Qwen3_5ForConditionalGeneration, vLLM's both classes

PEFT on the wrong form leaves every layer as it is, with a warning at most. Temper itself reads either, each with the
names of its class: a pattern that names the other class's has no effect before the conversion and none after it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

from safetensors.torch import save
from torch import Tensor

from services.common.errors import AdapterRejected, InvalidRequest
from services.engine.models.config import ModelConfig
from services.engine.models.lora.binding import ADAPTER_DTYPES, PEFT_PREFIX, bind_adapter, prefix_of, sort_tensors
from services.engine.models.lora.peft_config import CONFIG_FILE, WEIGHTS_FILE, AdapterSettings, parse_config
from services.engine.models.lora.targets import TARGET_MODULES
from services.engine.models.weights.tensor_file import read_tensors

Form: TypeAlias = Literal["text", "multimodal"]
FORMS: tuple[Form, ...] = get_args(Form)
_PREFIXES: Mapping[Form, str] = {"text": "model.", "multimodal": "model.language_model."}
_HIGHEST_RANK = 2**16


def convert(files: Mapping[str, bytes], form: Form, config: ModelConfig | None = None) -> dict[str, bytes]:
    """The same adapter with keys of the asked form; numbers and their dtype stay.

    Args:
        config: of the base model, against which every tensor is bound then; None: they only have to fit each other.

    Raises:
        AdapterRejected: a tensor is unknown, missing, twice there or misshaped, or the configuration is not plain LoRA.
        InvalidRequest: there is no such form.
    """
    if form not in _PREFIXES:
        raise InvalidRequest(f"{form!r} is not a form of keys: choose from {', '.join(FORMS)}", param="to")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if name not in files:
            raise AdapterRejected(f"the adapter has no {name}")
    if config is not None:
        bind_adapter(files, config, max_rank=_HIGHEST_RANK)
    data = parse_config(files[CONFIG_FILE])
    settings, own, halves = read_pairs(files)
    prefix = PEFT_PREFIX + _PREFIXES[form]
    tensors = {f"{prefix}{path}.lora_{half}.weight": tensor for (path, half), tensor in halves.items()}
    paths = sorted({path for path, _ in halves})
    return {
        WEIGHTS_FILE: save(tensors, metadata={"format": "pt"}),
        CONFIG_FILE: json.dumps(_config(data, settings, own, paths), indent=2, sort_keys=True).encode(),
    }


def read_pairs(files: Mapping[str, bytes]) -> tuple[AdapterSettings, str, dict[tuple[str, str], Tensor]]:
    """What an adapter says of itself: its settings, the prefix that its keys have, and both halves of each layer.

    Raises:
        AdapterRejected: a tensor is unknown, missing, twice there or misshaped, or the configuration is not plain LoRA.
    """
    settings = AdapterSettings(parse_config(files[CONFIG_FILE]))
    read = _tensors(files[WEIGHTS_FILE])
    own = prefix_of(read)
    found = sort_tensors(read, _KnownLayers(settings, own))
    halves = {place: tensor for place, (_, tensor) in found.items()}
    _check_halves(halves, settings, own)
    return settings, own, halves


def form_of(weights: bytes) -> Form:
    """Which form the keys of adapter_model.safetensors have, by the first one.

    Raises:
        AdapterRejected: the file is corrupt or empty.
    """
    first = next(iter(_tensors(weights)), None)
    if first is None:
        raise AdapterRejected(f"{WEIGHTS_FILE} has no tensors")
    return "multimodal" if first.startswith(PEFT_PREFIX + _PREFIXES["multimodal"]) else "text"


def _tensors(weights: bytes) -> dict[str, Tensor]:
    try:
        return read_tensors(weights)
    except (ValueError, RecursionError) as error:
        raise AdapterRejected(f"{WEIGHTS_FILE} is corrupt: {error}") from error


class _KnownLayers:
    """Paths of linear layers that the configuration adapts."""

    def __init__(self, settings: AdapterSettings, prefix: str) -> None:
        self._settings, self._prefix = settings, prefix

    def __contains__(self, path: object) -> bool:
        known = isinstance(path, str) and path.rsplit(".", 1)[1] in TARGET_MODULES
        return known and self._settings.targets(f"{self._prefix}{path}")


def _check_halves(halves: Mapping[tuple[str, str], Tensor], settings: AdapterSettings, prefix: str) -> None:
    """What can be said without a model: pairs that fit each other, and nothing missing that the configuration lists."""
    if not halves:
        raise AdapterRejected(f"{WEIGHTS_FILE} has no tensors")
    for path in sorted({path for path, _ in halves}):
        for half in ("A", "B"):
            if (path, half) not in halves:
                raise AdapterRejected(f"tensor {path}.lora_{half}.weight is missing from the adapter")
        a, b, rank = halves[path, "A"], halves[path, "B"], settings.rank(prefix + path)
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
            raise AdapterRejected(
                f"{path}: lora_A is {list(a.shape)} and lora_B {list(b.shape)}, {CONFIG_FILE} gives rank {rank}"
            )
        for half, tensor in (("A", a), ("B", b)):
            if tensor.dtype not in ADAPTER_DTYPES:
                raise AdapterRejected(
                    f"tensor {path}.lora_{half}.weight is {tensor.dtype}: only float32, bfloat16 and float16 "
                    "are supported"
                )
    unmatched = settings.unmatched({prefix + path for path, _ in halves})
    missing = [name for name in unmatched if name.rsplit(".", 1)[-1] in TARGET_MODULES]
    if missing:
        raise AdapterRejected(
            f"{CONFIG_FILE}: target_modules names {', '.join(missing)}, but {WEIGHTS_FILE} has no tensor of it"
        )


def _config(data: Mapping[str, Any], settings: AdapterSettings, prefix: str, paths: list[str]) -> dict[str, Any]:
    """adapter_config.json without a word of the class: layers are named from "layers." on, which PEFT finds in both."""
    ranks = {path: settings.rank(prefix + path) for path in paths}
    alphas = {path: settings.alpha(prefix + path) for path in paths}
    names = settings.plain_names
    return {
        **data,
        "target_modules": paths if names is None else sorted(names),
        "exclude_modules": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "rank_pattern": {path: rank for path, rank in ranks.items() if rank != settings.r},
        "alpha_pattern": {path: alpha for path, alpha in alphas.items() if alpha != settings.lora_alpha},
    }

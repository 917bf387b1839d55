"""adapter_config.json as PEFT writes it: which linear layers, what rank and alpha; refused if it is not plain LoRA."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import re2

from services.common.errors import AdapterRejected

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"

_UNDERSTOOD = frozenset(
    [
        "peft_type",
        "r",
        "lora_alpha",
        "target_modules",
        "exclude_modules",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "bias",
        "fan_in_fan_out",
        "init_lora_weights",
        "layers_to_transform",
        "layers_pattern",
    ]
)
_WITHOUT_EFFECT = frozenset(
    [
        "task_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "lora_dropout",
        "megatron_core",
        "qalora_group_size",
        "runtime_config",
        "ensure_weight_tying",
        "eva_config",
        "loftq_config",
        "corda_config",
        "lora_ga_config",
    ]
)
"""Fields that change how an adapter was made or is trained, not what its tensors mean. Any other field that is set
(use_dora, modules_to_save, lora_bias, …) means something we do not compute."""
_PLAIN_INIT = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initialisations that leave the base weights as they are; pissa, olora, corda, loftq and others change them."""
_MAX_PATTERNS = 4096


def parse_config(data: bytes) -> dict[str, Any]:
    """The object in adapter_config.json. Raises AdapterRejected."""
    try:
        parsed = json.loads(data)
    except ValueError as error:
        raise AdapterRejected(f"{CONFIG_FILE} is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise AdapterRejected(f"{CONFIG_FILE} is not a JSON object")
    return parsed


class AdapterSettings:
    """The fields of adapter_config.json that matter, checked: AdapterRejected names the field."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        for field, value in data.items():
            known = field in _UNDERSTOOD or field in _WITHOUT_EFFECT
            if not known and value not in (None, False, {}, []):
                raise AdapterRejected(f"{CONFIG_FILE}: {field}={value!r} is not supported: only plain LoRA is")
        if data.get("peft_type") != "LORA":
            raise AdapterRejected(f"{CONFIG_FILE}: peft_type must be LORA, got {data.get('peft_type')!r}")
        if data.get("bias", "none") != "none":
            raise AdapterRejected(f"{CONFIG_FILE}: bias={data['bias']!r} is not supported, only 'none' is")
        if data.get("fan_in_fan_out"):
            raise AdapterRejected(f"{CONFIG_FILE}: fan_in_fan_out=true does not fit linear layers")
        init = data.get("init_lora_weights", True)
        if init not in _PLAIN_INIT:
            raise AdapterRejected(f"{CONFIG_FILE}: init_lora_weights={init!r} changes the base weights: not supported")
        self.use_rslora = _boolean(data, "use_rslora")
        self.r: int = _positive(data.get("r"), "r", whole=True)
        self.lora_alpha: float = _positive(data.get("lora_alpha"), "lora_alpha")
        self._rank_pattern = _pattern(data, "rank_pattern")
        self._alpha_pattern = _pattern(data, "alpha_pattern")
        self._targets = _names(data.get("target_modules"), "target_modules")
        self._excluded = _names(data["exclude_modules"], "exclude_modules") if data.get("exclude_modules") else ()
        self._layers = _layers(data.get("layers_to_transform"))
        if not self._targets:
            raise AdapterRejected(f"{CONFIG_FILE}: target_modules is missing: an explicit list is needed")

    def targets(self, path: str) -> bool:
        """Whether PEFT would put an adapter on this linear layer (peft.tuners.tuners_utils)."""
        if self._matches(self._excluded, path) or not self._matches(self._targets, path):
            return False
        return self._layers is None or isinstance(self._targets, str) or int(path.split(".")[1]) in self._layers

    def rank(self, path: str) -> int:
        """Of the adapter of one linear layer."""
        value = self._from_pattern(self._rank_pattern, path)
        return self.r if value is None else _positive(value, f"rank_pattern of {path}", whole=True)

    def alpha(self, path: str) -> float:
        """Of the adapter of one linear layer."""
        value = self._from_pattern(self._alpha_pattern, path)
        return self.lora_alpha if value is None else _positive(value, f"alpha_pattern of {path}")

    @property
    def plain_names(self) -> tuple[str, ...] | None:
        """Last names of the modules, if the configuration says no more: no paths, patterns, layers or exceptions."""
        plain = not isinstance(self._targets, str) and not self._excluded and self._layers is None
        return tuple(self._targets) if plain and not any("." in name for name in self._targets) else None

    def unmatched(self, paths: Iterable[str]) -> list[str]:
        """Entries of a list of target_modules that none of these linear layers belongs to."""
        if isinstance(self._targets, str):
            return []
        known = list(paths)
        return [name for name in self._targets if not any(self._matches([name], path) for path in known)]

    @staticmethod
    def _matches(names: str | Sequence[str], path: str) -> bool:
        if isinstance(names, str):
            if names == "all-linear":
                return True
            return any(re2.fullmatch(names, prefix + path) for prefix in ("model.language_model.", "model."))
        full = ("model.language_model." + path, "model." + path)
        return any(name == f or f.endswith("." + name) for name in names for f in full)

    @staticmethod
    def _from_pattern(pattern: Mapping[str, Any], path: str) -> Any:
        for key, value in pattern.items():
            for prefix in ("model.language_model.", "model."):
                if re2.fullmatch(rf"(.*\.)?({key})", prefix + path):
                    return value
        return None


def _boolean(data: Mapping[str, Any], field: str) -> bool:
    value = data.get(field, False)
    if not isinstance(value, bool):
        raise AdapterRejected(f"{CONFIG_FILE}: {field} must be true or false, got {value!r}")
    return value


def _positive(value: Any, field: str, *, whole: bool = False) -> Any:
    good = isinstance(value, int) or (isinstance(value, float) and not whole and math.isfinite(value))
    if not good or isinstance(value, bool) or value <= 0:
        raise AdapterRejected(
            f"{CONFIG_FILE}: {field} must be a positive {'integer' if whole else 'number'}: {value!r}"
        )
    return value


def _pattern(data: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    value = data.get(field) or {}
    if not isinstance(value, dict):
        raise AdapterRejected(f"{CONFIG_FILE}: {field} must be an object, got {value!r}")
    if len(value) > _MAX_PATTERNS:
        raise AdapterRejected(f"{CONFIG_FILE}: {field} has {len(value)} entries, the limit is {_MAX_PATTERNS}")
    for key in value:
        _compiles(key, field)
    return value


def _names(value: Any, field: str) -> str | Sequence[str]:
    if isinstance(value, str):
        if value != "all-linear":
            _compiles(value, field)
        return value
    if value is None or (isinstance(value, list) and all(isinstance(name, str) for name in value)):
        return tuple(value or ())
    raise AdapterRejected(f"{CONFIG_FILE}: {field} must be a list of module names or a pattern, got {value!r}")


def _compiles(pattern: str, field: str) -> None:
    # RE2, because its time is linear: Python's re backtracks, holds the GIL, and one uploaded "(a+)+!" would stop the
    # engine for good. It has no lookaround and no backreferences; PEFT's own patterns use neither.
    if len(pattern) > 2000:
        raise AdapterRejected(f"{CONFIG_FILE}: a pattern of {field} is over 2000 characters")
    options = re2.Options()
    options.log_errors = False
    try:
        re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0].decode() if error.args and isinstance(error.args[0], bytes) else str(error)
        raise AdapterRejected(f"{CONFIG_FILE}: {field} has a malformed pattern {pattern!r}: {reason}") from error


def _layers(value: Any) -> frozenset[int] | None:
    if value is None or value == []:
        return None
    numbers = value if isinstance(value, list) else [value]
    if not all(isinstance(number, int) for number in numbers):
        raise AdapterRejected(f"{CONFIG_FILE}: layers_to_transform must be layer numbers, got {value!r}")
    return frozenset(numbers)

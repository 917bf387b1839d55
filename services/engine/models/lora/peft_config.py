"""adapter_config.json as PEFT reads it: which linear layers, what rank and alpha; refused if it is not plain LoRA.

Everything here is asked of a module's whole name, `model.layers.3.self_attn.q_proj` or, in the multimodal class,
`model.language_model.layers.3.self_attn.q_proj`: patterns are matched against the name that the keys of the file have
and no other, so that one without effect in PEFT has none here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from services.common.errors import AdapterRejected
from services.common.jobs.fields.lora import means_all_linear
from services.common.validation.json_text import parsed_json
from services.engine.models.lora.module_patterns import Effort, PatternMalformed, PatternRefused, tail, whole

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
_NAME = re.compile(r"[\w.]{1,100}", re.ASCII)


def parse_config(data: bytes) -> dict[str, Any]:
    """The object in adapter_config.json. Raises AdapterRejected."""
    try:
        parsed = parsed_json(data, allow_inf_nan=True)
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
        if not isinstance(init, bool | str | None) or init not in _PLAIN_INIT:
            raise AdapterRejected(f"{CONFIG_FILE}: init_lora_weights={init!r} changes the base weights: not supported")
        self.use_rslora = _boolean(data, "use_rslora")
        self.r: int = _positive(data.get("r"), "r", whole=True)
        self.lora_alpha: float = _positive(data.get("lora_alpha"), "lora_alpha")
        effort = Effort()
        self._ranks = _pattern(data, "rank_pattern", effort)
        self._alphas = _pattern(data, "alpha_pattern", effort)
        self._targets = _names(data, "target_modules", effort)
        self._excluded = _names(data, "exclude_modules", effort)
        self._all_linear = means_all_linear(data.get("target_modules"))
        self._layers = _layers(data)
        if self._targets == ():
            raise AdapterRejected(f"{CONFIG_FILE}: target_modules is missing: an explicit list is needed")

    def targets(self, name: str) -> bool:
        """True if PEFT would put an adapter on this linear layer (peft.tuners.tuners_utils.check_target_module_exists).

        Raises:
            AdapterRejected: a pattern takes too long to match; so do rank() and alpha().
        """
        if _among(self._excluded, name):
            return False
        if self._all_linear:
            return True
        if not _among(self._targets, name):
            return False
        # A layer that is listed by its whole name is meant, whatever layers_to_transform says.
        return self._layers is None or name in self._listed or self._layers(name)

    def rank(self, name: str) -> int:
        """Rank of the adapter of one linear layer."""
        value = _first(self._ranks, name)
        return self.r if value is None else _positive(value, f"rank_pattern of {name}", whole=True)

    def alpha(self, name: str) -> float:
        """Alpha of the adapter of one linear layer."""
        value = _first(self._alphas, name)
        return self.lora_alpha if value is None else _positive(value, f"alpha_pattern of {name}")

    @property
    def _listed(self) -> tuple[str, ...]:
        """The entries of target_modules, if it is a list."""
        return self._targets if isinstance(self._targets, tuple) else ()

    @property
    def plain_names(self) -> tuple[str, ...] | None:
        """Last names of the modules, if the configuration says no more: no paths, patterns, layers or exceptions."""
        plain = self._listed and not self._all_linear and self._excluded == () and self._layers is None
        return self._listed if plain and not any("." in name for name in self._listed) else None

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Entries of a list of target_modules that none of these linear layers belongs to."""
        if self._all_linear:
            return []
        known = list(names)
        return [entry for entry in self._listed if not any(_among((entry,), name) for name in known)]


_Matcher: TypeAlias = Callable[[str], bool]


def _among(names: tuple[str, ...] | _Matcher, name: str) -> bool:
    """True if a list has the name or its end from some dot on, or a pattern matches all of it."""
    if not isinstance(names, tuple):
        return names(name)
    return any(name == entry or name.endswith("." + entry) for entry in names)


def _first(patterns: list[tuple[_Matcher, Any]], name: str) -> Any:
    return next((value for matches, value in patterns if matches(name)), None)


def _boolean(data: Mapping[str, Any], field: str) -> bool:
    value = data.get(field)
    if value is not None and not isinstance(value, bool):
        raise AdapterRejected(f"{CONFIG_FILE}: {field} must be true or false, got {value!r}")
    return bool(value)


def _positive(value: Any, field: str, *, whole: bool = False) -> Any:
    good = isinstance(value, int) or (isinstance(value, float) and not whole and math.isfinite(value))
    if not good or isinstance(value, bool) or value <= 0:
        raise AdapterRejected(
            f"{CONFIG_FILE}: {field} must be a positive {'integer' if whole else 'number'}: {value!r}"
        )
    return value


def _pattern(data: Mapping[str, Any], field: str, effort: Effort) -> list[tuple[_Matcher, Any]]:
    value = data.get(field) or {}
    if not isinstance(value, dict):
        raise AdapterRejected(f"{CONFIG_FILE}: {field} must be an object, got {value!r}")
    if len(value) > _MAX_PATTERNS:
        raise AdapterRejected(f"{CONFIG_FILE}: {field} has {len(value)} entries, the limit is {_MAX_PATTERNS}")
    return [(_compiled(tail, key, field, effort), entry) for key, entry in value.items()]


def _names(data: Mapping[str, Any], field: str, effort: Effort) -> tuple[str, ...] | _Matcher:
    value = data.get(field) or ()
    if isinstance(value, str):
        return _compiled(whole, value, field, effort)
    if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
        return tuple(value)
    raise AdapterRejected(f"{CONFIG_FILE}: {field} must be a list of module names or a pattern, got {value!r}")


def _compiled(how: Callable[[str, Effort], _Matcher], pattern: str, field: str, effort: Effort) -> _Matcher:
    def refused(error: PatternRefused) -> AdapterRejected:
        shown = pattern if len(pattern) <= 200 else pattern[:200] + "…"
        if isinstance(error, PatternMalformed):
            return AdapterRejected(f"{CONFIG_FILE}: {field} has a malformed pattern {shown!r}: {error}")
        return AdapterRejected(f"{CONFIG_FILE}: the pattern {shown!r} of {field} {error}")

    try:
        matches = how(pattern, effort)
    except PatternRefused as error:
        raise refused(error) from error

    def checked(name: str) -> bool:
        try:
            return matches(name)
        except PatternRefused as error:
            raise refused(error) from error

    return checked


def _layers(data: Mapping[str, Any]) -> _Matcher | None:
    """True if a module lies in a layer of layers_to_transform, whose number stands behind a name of layers_pattern."""
    value, pattern = data.get("layers_to_transform"), data.get("layers_pattern") or []
    names = [pattern] if isinstance(pattern, str) else pattern
    if not isinstance(names, list) or not all(isinstance(name, str) and _NAME.fullmatch(name) for name in names):
        raise AdapterRejected(f"{CONFIG_FILE}: layers_pattern must be names of modules, got {pattern!r}")
    if value is None or value == []:
        if names:
            raise AdapterRejected(f"{CONFIG_FILE}: layers_pattern needs layers_to_transform, as in PEFT")
        return None
    if isinstance(data.get("target_modules"), str):
        raise AdapterRejected(
            f"{CONFIG_FILE}: layers_to_transform needs a list as target_modules, as in PEFT: a pattern names layers"
        )
    numbers = value if isinstance(value, list) else [value]
    if not all(isinstance(number, int) for number in numbers):
        raise AdapterRejected(f"{CONFIG_FILE}: layers_to_transform must be layer numbers, got {value!r}")
    behind = re.compile(rf"(?:^|.*\.)(?:{'|'.join(names) or '[^.]*'})\.(\d+)\.")

    def within(name: str) -> bool:
        found = behind.match(name)
        return found is not None and int(found[1]) in numbers

    return within

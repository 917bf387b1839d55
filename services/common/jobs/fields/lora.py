"""Shape of an adapter in a request: rank, alpha, and which linear layers of the model it changes.

Shapes of the layers are the engine's (services/engine/models/lora/targets.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, WithJsonSchema, model_serializer

from services.common.errors import InvalidRequest
from services.common.validation.errors import suggestion
from services.common.validation.strict_models import SentModel

TARGET_MODULES: tuple[str, ...] = (
    "down_proj",
    "gate_proj",
    "in_proj_a",
    "in_proj_b",
    "in_proj_qkv",
    "in_proj_z",
    "k_proj",
    "o_proj",
    "out_proj",
    "q_proj",
    "up_proj",
    "v_proj",
)
"""Last names of all linear layers of the text model."""
ALL_LINEAR = "all-linear"
"""PEFT's word for all of them."""


def means_all_linear(names: Any) -> bool:
    """Whether target_modules is PEFT's word for all linear layers, by itself or in a list."""
    given = names if isinstance(names, list | tuple) else (names,)
    return any(isinstance(name, str) and name.lower() == ALL_LINEAR for name in given)


_PATH = rf"(layers\.[0-9]{{1,5}}\.(self_attn|linear_attn|mlp|mlp\.shared_expert)\.)?({'|'.join(TARGET_MODULES)})"
LinearName = Annotated[str, WithJsonSchema({"type": "string", "pattern": f"^{_PATH}$"})]
"""A name of linear layers, in descriptions."""


def is_linear(name: str) -> bool:
    """Whether it is the last name of linear layers, or the path of one; which layers there are is the engine's."""
    return re.fullmatch(_PATH, name) is not None


def _linear_layers(value: Any) -> Any:
    if means_all_linear(value):
        return ALL_LINEAR
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        return value
    if not value:
        raise ValueError(f'is empty: name linear layers, or leave it out (or say "{ALL_LINEAR}") for all of them')
    for name in value:
        if not is_linear(name):
            raise ValueError(
                f"{name[:80]!r} is no linear layer of the model{suggestion(name, TARGET_MODULES)}: choose from "
                f'{", ".join(TARGET_MODULES)}, or "{ALL_LINEAR}"'
            )
    return value


TargetModules = Annotated[
    Literal["all-linear"] | list[str],
    BeforeValidator(
        _linear_layers, json_schema_input_type=Literal["all-linear"] | Annotated[list[LinearName], Field(min_length=1)]
    ),
]


class LoraSettings(SentModel):
    """Shape of a new adapter. A job that continues one takes its shape: fields that are given must agree with it."""

    rank: int = Field(16, ge=1, le=256)
    alpha: float = Field(32.0, gt=0)
    use_rslora: bool = False
    target_modules: TargetModules | None = None
    """Last names of linear layers, or whole paths ("layers.3.self_attn.q_proj"). None and "all-linear": all of them."""
    seed: int = Field(0, ge=0, lt=2**63)

    @model_serializer(mode="wrap")
    def _only_given(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # What was given explicitly must agree with a continued adapter, and must survive the queue's JSON as such.
        return {name: value for name, value in handler(self).items() if name in self.model_fields_set}


def check_agrees(given: LoraSettings, present: Mapping[str, Any], all_linear: Sequence[str]) -> None:
    """Compares the lora fields that were given with those of the adapter.

    Args:
        present: rank, alpha, use_rslora and target_modules (sorted), as far as they are known.
        all_linear: what target_modules "all-linear" stands for, sorted.

    Raises:
        InvalidRequest: they contradict each other; names the field.
    """
    for name, value in present.items():
        asked = getattr(given, name)
        if name not in given.model_fields_set or asked is None:
            continue
        if name == "target_modules":
            asked = tuple(all_linear) if isinstance(asked, str) else tuple(sorted(set(asked)))
        if asked != value:
            raise InvalidRequest(
                f"lora.{name} is {asked!r}, but the adapter this job continues has {value!r}: leave it out to "
                'continue, or set start_from to "base" to start afresh',
                param=f"lora.{name}",
            )


def stated_shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """Shape of an adapter by its adapter_config.json, as far as the file is as plain as `check_agrees` needs it.
    Patterns and paths, which only the files themselves make plain, are left out."""
    found: dict[str, Any] = {}
    if isinstance(config.get("r"), int):
        found["rank"] = config["r"]
    if isinstance(config.get("lora_alpha"), int | float):
        found["alpha"] = float(config["lora_alpha"])
    if isinstance(config.get("use_rslora", False), bool):
        found["use_rslora"] = config.get("use_rslora", False)
    targets = config.get("target_modules")
    chosen = any(config.get(name) for name in ("exclude_modules", "layers_to_transform", "layers_pattern"))
    if isinstance(targets, list) and targets and not chosen and all(name in TARGET_MODULES for name in targets):
        found["target_modules"] = tuple(sorted(set(targets)))
    return found

"""The shape of the adapter that a job continues: what the job says of it must agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.common.errors import InvalidRequest
from services.common.jobs.base import LoraSettings
from services.common.jobs.fields.lora import TARGET_MODULES


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
    """What adapter_config.json says as plainly as `check_agrees` compares it; of patterns and paths, which only the
    files themselves make plain, nothing."""
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

"""Names of the linear layers that adapters change, for requests; their shapes are the engine's (lora_targets)."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import WithJsonSchema

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


_PATH = rf"(layers\.[0-9]{{1,5}}\.(self_attn|linear_attn|mlp)\.)?({'|'.join(TARGET_MODULES)})"
LinearName = Annotated[str, WithJsonSchema({"type": "string", "pattern": f"^{_PATH}$"})]
"""A name of linear layers, in descriptions."""


def is_linear(name: str) -> bool:
    """Whether it is the last name of linear layers, or the path of one; which layers there are is the engine's."""
    return re.fullmatch(_PATH, name) is not None

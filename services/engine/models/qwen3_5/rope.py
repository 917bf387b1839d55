"""Rotation of positions as config.json describes it: rope_parameters, or the older rope_scaling. Without torch.

The meaning of the keys is that of transformers 5 (modeling_rope_utils.py), whose Qwen3.5 the parity tests run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.common.errors import CheckpointRejected
from services.engine.models.config import integer, number

_TYPES = ("default", "mrope", "yarn")
"""mrope has one position on each of three axes; for text all three are equal, which is plain rope."""
_PARTIAL = 0.25
"""Share of a head that is rotated, where config.json does not say."""


@dataclass(frozen=True, slots=True)
class Yarn:
    """Lengthening of the context by YaRN (Peng et al., arXiv 2309.00071).

    Raises:
        CheckpointRejected: the numbers contradict each other.
    """

    factor: float
    """How many times as long the context is."""
    original_context: int
    """Tokens of the context that the model was trained with."""
    beta_fast: float
    """Turns within the original context from which on a pair of dimensions keeps its frequency."""
    beta_slow: float
    """Turns up to which a pair's frequency is divided by the factor."""
    truncate: bool
    """Between the two, whole pairs begin and end the mixture."""
    attention_factor: float
    """Factor of cosines and sines."""

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise CheckpointRejected(f"config.json: rope_parameters.factor must be at least 1, got {self.factor}")
        if self.beta_slow > self.beta_fast:
            raise CheckpointRejected(
                f"config.json: rope_parameters.beta_slow ({self.beta_slow}) is above beta_fast ({self.beta_fast})"
            )


@dataclass(frozen=True, slots=True)
class Rope:
    """Contents of rope_parameters."""

    theta: float
    partial: float
    """Share of a head that is rotated."""
    max_position_embeddings: int
    """Longest context: what config.json states or, where YaRN lengthens it and config.json states the original one,
    that many times as much."""
    original_max_position_embeddings: int | None
    """The context before it was lengthened, where config.json says so."""
    yarn: Yarn | None


def read_rope(text: Mapping[str, Any]) -> Rope:
    """Reads the keys of a text model's config.

    Raises:
        CheckpointRejected: a malformed key, or a kind of rotation that is not supported.
    """
    given = _parameters(text)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in _TYPES:
        raise CheckpointRejected(
            f"config.json: rope_parameters.rope_type {kind!r} is not supported, only {', '.join(_TYPES)} are"
        )
    merged = {**text, **given}
    partial = number(merged, "partial_rotary_factor") if "partial_rotary_factor" in merged else _PARTIAL
    stated = integer(text, "max_position_embeddings")
    named = text.get("original_max_position_embeddings")
    original = None if named is None else integer(text, "original_max_position_embeddings")
    yarn = _yarn(text, given, stated) if kind == "yarn" else None
    if yarn is not None:
        original = yarn.original_context
        stated = stated if stated > original else int(original * yarn.factor)
    return Rope(number(merged, "rope_theta"), partial, stated, original, yarn)


def _parameters(text: Mapping[str, Any]) -> Mapping[str, Any]:
    newer, older = text.get("rope_parameters") or {}, text.get("rope_scaling") or {}
    for name, value in (("rope_parameters", newer), ("rope_scaling", older)):
        if not isinstance(value, Mapping):
            raise CheckpointRejected(f"config.json: {name} is not an object")
    if newer and older and newer != older:
        raise CheckpointRejected(
            "config.json: rope_parameters and rope_scaling differ: put all keys into rope_parameters alone"
        )
    return newer or older


def _yarn(text: Mapping[str, Any], given: Mapping[str, Any], stated: int) -> Yarn:
    where = {f"rope_parameters.{key}": value for key, value in given.items()}

    def optional(key: str, default: float) -> float:
        return number(where, f"rope_parameters.{key}") if given.get(key) else default

    if text.get("original_max_position_embeddings") is not None:
        original = integer(text, "original_max_position_embeddings")
    elif given.get("original_max_position_embeddings") is not None:
        original = integer(where, "rope_parameters.original_max_position_embeddings")
    else:
        original = stated
    factor = optional("factor", stated / original)
    truncate = given.get("truncate", True)
    if not isinstance(truncate, bool):
        raise CheckpointRejected(f"config.json: rope_parameters.truncate must be true or false, got {truncate!r}")
    of_one, of_all = optional("mscale", 0.0), optional("mscale_all_dim", 0.0)
    attention = _attention(factor, of_one) / _attention(factor, of_all) if of_one and of_all else _attention(factor, 1)
    return Yarn(
        factor=factor,
        original_context=original,
        beta_fast=optional("beta_fast", 32.0),
        beta_slow=optional("beta_slow", 1.0),
        truncate=truncate,
        attention_factor=optional("attention_factor", attention),
    )


def _attention(factor: float, scale: float) -> float:
    """Factor of cosines and sines that the paper recommends (section 3.4)."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

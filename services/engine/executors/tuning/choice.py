"""Choice of configurations for a decode step of one number of rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from kernels.gpu.attention.decode import DecodeConfig
from kernels.gpu.configs import Product, Tuned
from kernels.gpu.linear.skinny_configs import SkinnyConfig

Subject = Product | Literal["attention"]
"""What a configuration is of."""
Config = SkinnyConfig | DecodeConfig | None
"""None: the vendor's product, with the rest in kernels of its own."""
Choice = Mapping[Subject, Config]
"""What differs from the table."""


def put(tuned: Tuned, rows: Iterable[int], choice: Choice) -> None:
    """Makes a choice the one that steps of so many rows are launched with, in place of what was tuned for them."""
    for count in rows:
        for key in [key for key in tuned.products if key[1] == count]:
            del tuned.products[key]
        tuned.attention.pop(count, None)
        for subject, config in choice.items():
            if isinstance(subject, Product):
                if isinstance(config, DecodeConfig):
                    raise TypeError(f"{subject} is no attention")
                tuned.products[subject, count] = config
            elif isinstance(config, DecodeConfig):
                tuned.attention[count] = config
            else:
                raise TypeError(f"attention is not cut up by {config}")


def name_of(subject: Subject) -> str:
    """Name of a subject in logs and tables."""
    if not isinstance(subject, Product):
        return subject
    storage = "" if subject.kind == "none" else f" {subject.kind}"
    return f"{subject.outputs} x {subject.inputs}{storage}"


def describe(config: Config) -> str:
    """Configuration in a few words."""
    if config is None:
        return "vendor's product"
    if isinstance(config, DecodeConfig):
        return f"{config.block_keys} keys, {config.stages} stages, {config.splits} splits of {config.min_keys}"
    parts: list[Any] = [config.variant, config.block_n, config.block_k, f"{config.warps} warps"]
    parts += [f"{config.stages} stages"] * (config.variant != "vector") + [f"{config.splits} splits"] * (
        config.splits > 1
    )
    parts += [f"prefetch {config.prefetch}"] * bool(config.prefetch) + ["staggered"] * config.stagger
    parts += [] if config.early is None else ["early" if config.early else "waits"]
    return " ".join(map(str, parts))

"""Adapters of different shapes for one base model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.common.jobs import LoraSettings
from services.engine.models.config import ModelConfig
from services.engine.models.lora.trainable import LoraParams


def adapter(
    config: ModelConfig,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    rslora: bool = False,
    modules: Sequence[str] | None = None,
    seed: int = 1,
    size: float = 0.1,
) -> dict[str, bytes]:
    """Files of an adapter whose B matrices are not zero."""
    settings = LoraSettings(
        rank=rank, alpha=alpha, use_rslora=rslora, target_modules=None if modules is None else list(modules), seed=seed
    )
    lora = LoraParams.create(config, settings)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for target in lora.targets.values():
            target.b.copy_(torch.randn(target.b.shape, generator=generator) * size)
    return lora.to_files("base")

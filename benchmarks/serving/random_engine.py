"""Engines with random weights that are made on their device: no checkpoint of a large shape has to fit a host or a
disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from benchmarks.lib.random_model import RandomWeights
from services.engine.models.footprint import Storage
from services.engine.models.interface import resolve_dtype
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.models.registry import read_config

if TYPE_CHECKING:
    from kernels.gpu.configs import KernelConfigs


@contextmanager
def made_on_the_device() -> Iterator[None]:
    """Inside, an engine that is built takes of its directory the config and the tokenizer only."""
    with (
        patch("services.pod.parts.loaded.load_model", _made),
        patch("services.pod.parts.loaded.checkpoint_digest", lambda _: "random"),
    ):
        yield


def _made(
    path: Path,
    *,
    dtype: torch.dtype | str,
    device: torch.device | str,
    storage: Storage,
    mtp: bool,
    kernels: KernelConfigs | None = None,
    **_: Any,
) -> Qwen3_5:
    """Model of ``path/config.json``; arguments as of registry.load_model()."""
    config, place = read_config(path), torch.device(device)
    if not isinstance(config, Qwen3_5Config):
        raise TypeError(f"{path} is not a Qwen3.5")
    workspace = None
    if place.type == "cuda":
        from kernels.gpu.linear.skinny import SplitWorkspace

        workspace = SplitWorkspace.allocate(place)
    kind = resolve_dtype(dtype, place) if isinstance(dtype, str) else dtype
    torch.manual_seed(0)
    made = RandomWeights(
        config,
        place,
        storage.quantization,
        workspace,
        kind,
        mtp=mtp,
        invariant=storage.invariant,
        draft_head=mtp and storage.has_draft_head(config, kind.itemsize),
        kernels=kernels,
    )
    model = Qwen3_5(config, made.build())
    if place.type == "cuda":
        torch.cuda.empty_cache()  # what making them took is free for the caches
    return model

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
from services.common.adapters.drafter_form import DrafterForm
from services.engine.models.footprint import Storage
from services.engine.models.interface import resolve_dtype
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.models.registry import read_config
from services.engine.models.weights.drafter import drafter_files

if TYPE_CHECKING:
    from kernels.gpu.configs import KernelConfigs


RANDOM_DIGEST = "random"
"""Digest of a model that is made on the device."""


def write_drafter(model: Path, into: Path, form: DrafterForm, base_digest: str) -> None:
    """Writes a directory with a drafter of random numbers.

    Args:
        model: directory with the config.json of the model that it is for.
    """
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.7 * shape[-1] ** -0.5, generator=generator)
        for name, shape in read_config(model).drafter_shapes(form).items()
    }
    into.mkdir(parents=True, exist_ok=True)
    for name, data in drafter_files(tensors, base_digest, {"random": True}, form).items():
        (into / name).write_bytes(data)


@contextmanager
def made_on_the_device() -> Iterator[None]:
    """Inside, an engine that is built takes of its directory the config and the tokenizer only."""
    with (
        patch("services.pod.parts.loaded.load_model", _made),
        patch("services.pod.parts.loaded.checkpoint_digest", lambda _: RANDOM_DIGEST),
    ):
        yield


def _made(
    path: Path,
    *,
    dtype: torch.dtype | str,
    device: torch.device | str,
    storage: Storage,
    mtp: bool,
    form: DrafterForm,
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
        form=form,
        invariant=storage.invariant,
        draft_head=mtp and storage.has_draft_head(config, kind.itemsize),
        kernels=kernels,
        prompts=storage.prompts,
    )
    model = Qwen3_5(config, made.build())
    if place.type == "cuda":
        torch.cuda.empty_cache()  # what making them took is free for the caches
    return model

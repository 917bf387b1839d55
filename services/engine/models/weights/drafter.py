"""A drafter's files: weights of its layers by canonical name, of which form they are, and whose."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save
from torch import Tensor

from services.common.adapters.drafter_form import MTP_FORM, DrafterForm
from services.common.adapters.manifest import (
    DRAFTER_CONFIG,
    DRAFTER_FORMAT,
    DRAFTER_WEIGHTS,
    drafter_base,
    drafter_form,
    kind_of,
)
from services.common.errors import AdapterRejected, InvalidRequest
from services.engine.models.config import ModelConfig
from services.engine.models.weights.tensor_file import read_tensors

if TYPE_CHECKING:
    from services.engine.models.batch import CacheBuffers

_PUT_OUT = ("o_proj.weight", "down_proj.weight", "down_proj")
"""Ends of the names of the tensors by which a layer adds to the residual stream."""
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class TakesDrafters:
    """Part of a language model that is about its mtp layer's weights, or a drafter's in their place: an architecture
    without such a layer has this."""

    def checkpoint_drafter(self, path: Path) -> dict[str, Tensor]:
        """Tensors of the mtp layer of this model's checkpoint, all of config.mtp_shapes(), float32 on the CPU.

        Raises:
            InvalidRequest: it has none.
            CheckpointRejected: the checkpoint is not this model's any more.
        """
        del path
        raise InvalidRequest(f"{type(self).__name__} has no mtp layer, so there is nothing to train", param="kind")

    @property
    def drafter_form(self) -> DrafterForm | None:
        """Form of what drafts; None: nothing that does is loaded."""
        return None

    def draft_block(self, out: Tensor, count: int, step: Any, cache: CacheBuffers) -> Tensor:
        """Runs a block drafter over the places behind some rows, all at once.

        Args:
            out: [R, hidden], what draft() returned for the rows.
            step: of a batch of R chunks of ``count`` tokens, in the order of the rows.

        Returns:
            [R · count, hidden]: for logits() of the tokens further on.
        """
        del out, count, step, cache
        raise ValueError("no block drafter is loaded")

    def stage_drafter(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        """Makes everything ready to write these tensors over those of the loaded drafter, where they are: what has been
        captured or launched reads them there.

        Args:
            tensors: all of config.drafter_shapes(), on the CPU.

        Returns:
            Function that writes, on the current stream; to be called between two steps.

        Raises:
            InvalidRequest: nothing that drafts is loaded.
            AdapterRejected: what is loaded is of another form.
        """
        del tensors
        raise InvalidRequest(
            "the engine runs without its mtp layer, so there is nothing that drafts: set TEMPER_SPECULATIVE=mtp",
            param="speculative",
        )

    def draft_packed(
        self,
        tensors: Mapping[str, Tensor],
        hidden: Tensor,
        ids: Sequence[Tensor],
        lengths: Sequence[int],
        *,
        give_way: Callable[[], None],
    ) -> list[Tensor]:
        """Runs a drafter over packed documents, once for each token that it proposes in a row; differentiable in its
        tensors. In plain torch on every device.

        Args:
            tensors: all of config.drafter_shapes(), on the model's device.
            hidden: [T, hidden], final hidden states of the rows, from forward_train().
            ids: [T] int64 each: the tokens one, two, … behind each row's.
            lengths: rows of each document.

        Returns:
            [T, hidden] for each of ``ids``: its logits are those of the token behind these. The first is as draft() has
            it. Each further one of an mtp layer is made of the one before, in the place of ``hidden``; of a block
            drafter all are made of the first, and of what stands for ``ids``, which it does not see.

        Raises:
            InvalidRequest: the architecture has no such layer.
        """
        del tensors, hidden, ids, lengths, give_way
        raise InvalidRequest(f"{type(self).__name__} has no mtp layer, so there is nothing to train", param="kind")


def read_drafter(files: Mapping[str, bytes], config: ModelConfig, base_digest: str) -> dict[str, Tensor]:
    """Tensors of a drafter, as views of its file.

    Args:
        config: of the model that it is to draft for.
        base_digest: of that model.

    Raises:
        AdapterRejected: it is of another base model, a later format or a form that there is not; a tensor is missing,
            unknown, misshaped, of another dtype or has numbers that are not finite; or a file is missing or corrupt.
    """
    if kind_of(files) != "drafter":
        raise AdapterRejected(f"a drafter has the files {DRAFTER_WEIGHTS} and {DRAFTER_CONFIG}, got {sorted(files)}")
    base = drafter_base(files[DRAFTER_CONFIG])
    if base != base_digest:
        raise AdapterRejected(
            f"the drafter belongs to another base model (digest {base[:12]}, this engine serves {base_digest[:12]}): "
            "train one on this model"
        )
    try:
        tensors = read_tensors(files[DRAFTER_WEIGHTS])
    except ValueError as error:
        raise AdapterRejected(f"{DRAFTER_WEIGHTS} is corrupt: {error}") from error
    form = drafter_form(files[DRAFTER_CONFIG])
    shapes = config.drafter_shapes(form)
    if not shapes:
        raise AdapterRejected("the served model's architecture has no mtp layer, so it takes no drafter")
    for name in shapes.keys() - tensors.keys():
        raise AdapterRejected(f"tensor {name} is missing from {DRAFTER_WEIGHTS}, which is to have {form}")
    for name, tensor in tensors.items():
        _check(name, tensor, shapes, form)
    return tensors


def _check(name: str, tensor: Tensor, shapes: Mapping[str, tuple[int, ...]], form: DrafterForm) -> None:
    if name not in shapes:
        raise AdapterRejected(f"tensor {name} of {DRAFTER_WEIGHTS} is not part of {form}")
    if tuple(tensor.shape) != shapes[name]:
        raise AdapterRejected(
            f"tensor {name} of {DRAFTER_WEIGHTS} has shape {list(tensor.shape)}, and {form} of this model has "
            f"{list(shapes[name])}"
        )
    if tensor.dtype not in _FLOATS:
        raise AdapterRejected(f"tensor {name} of {DRAFTER_WEIGHTS} is {tensor.dtype}: only plain floats are read")
    if not bool(tensor.isfinite().all()):
        raise AdapterRejected(f"tensor {name} of {DRAFTER_WEIGHTS} has numbers that are not finite")


def stage_files(
    files: Mapping[str, bytes],
    *,
    config: ModelConfig,
    stage: Callable[[Mapping[str, Tensor]], Callable[[], None]],
    base_digest: str,
    queue: Callable[[], AbstractContextManager[object]],
) -> Callable[[], None]:
    """Reads a drafter and makes it ready to be written over the one that the model has.

    Args:
        config: of the model.
        stage: its stage_drafter().
        queue: context in which work goes to where the model's steps are.

    Returns:
        Function that writes; to be called between two steps.

    Raises:
        AdapterRejected: see read_drafter(), or the model has one of another form.
        InvalidRequest: the model has none loaded.
    """
    write = stage(read_drafter(files, config, base_digest))

    def queued() -> None:
        with queue():
            write()

    return queued


def read_directory(path: Path) -> dict[str, bytes]:
    """A drafter's files from a directory. Raises AdapterRejected: one cannot be read."""
    files = {}
    for name in (DRAFTER_WEIGHTS, DRAFTER_CONFIG):
        try:
            files[name] = (path / name).read_bytes()
        except OSError as error:
            raise AdapterRejected(f"{path / name} cannot be read: {error.strerror}", param="drafter") from error
    return files


def grown(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Tensors of a drafter that begins as another one: what that has not is random. Further layers change nothing at
    first, as what they put out is zero.

    Args:
        tensors: of the other one, float32.
        shapes: of the drafter.
    """
    generator = torch.Generator().manual_seed(seed)
    made = dict(tensors)
    for name, shape in sorted(shapes.items()):
        if name in made:
            continue
        silent = len(shape) == 1 or name.endswith(_PUT_OUT)
        scale = 0.0 if silent else shape[-1] ** -0.5
        made[name] = scale * torch.randn(shape, generator=generator)
    return made


def drafter_files(
    tensors: Mapping[str, Tensor],
    base_digest: str,
    provenance: Mapping[str, Any],
    form: DrafterForm = MTP_FORM,
) -> dict[str, bytes]:
    """Files of a drafter.

    Args:
        tensors: by canonical name.
        base_digest: of the model that it drafts for.
        provenance: what it comes of, in JSON.
    """
    described = form.stated() | {
        "format": DRAFTER_FORMAT,
        "base_digest": base_digest,
        "shapes": {name: list(tensor.shape) for name, tensor in sorted(tensors.items())},
        "provenance": dict(provenance),
    }
    weights = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    return {
        DRAFTER_WEIGHTS: save(weights, metadata={"format": "pt"}),
        DRAFTER_CONFIG: json.dumps(described, indent=1, sort_keys=True).encode(),
    }

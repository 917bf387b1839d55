"""Measurement of importance: from a checkpoint, and calibration data where the method needs some, to scores."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from services.common.errors import InvalidRequest
from services.common.jobs.kinds.forge import NEED_DATA
from services.engine.models.interface import CausalLM
from services.engine.models.weights.shards import Progress, silent
from services.forge.compaction import Base
from services.forge.importance.by_data import activations, gradients
from services.forge.importance.calibration import Calibration
from services.forge.importance.leave_one_out import leave_one_out
from services.forge.importance.scores import Scores
from services.forge.importance.settings import Found, Settings
from services.forge.importance.weight_norms import WeightNorms
from services.forge.units import MTP_LAYER, WIDTHS, Width, count, places


def measure(
    base: Base,
    base_digest: str,
    settings: Settings,
    load: Callable[[], CausalLM],
    calibration: Calibration | None,
    progress: Progress = silent,
    give_way: Callable[[], None] = lambda: None,
) -> Scores:
    """Scores of all units. The layer that predicts the token after next is not part of the loss: its units have the
    norm of their weights where a method needs data.

    Args:
        load: the checkpoint as a model, if the method needs one.
        give_way: called between layers, for others to compute.

    Raises:
        InvalidRequest: the method needs data and there is none, or a score is not finite.
    """
    if settings.method in NEED_DATA:
        if calibration is None:
            raise InvalidRequest(f"importance by {settings.method} is measured on data: name a file", param="data")
        progress("loading the model", 0, 0)
        by_data = {"activations": activations, "gradients": gradients, "leave_one_out": leave_one_out}
        found = by_data[settings.method](base, load(), calibration, settings, progress, give_way)
    else:
        found = (_weights if settings.method == "weights" else _random)(base, settings)
    widths = {width: dict(found.widths[width]) for width in settings.widths}
    if base.mtp and settings.method in NEED_DATA:
        norms = WeightNorms(base)
        for width in widths.keys() & {"kv_groups", "mlp_channels"}:
            widths[width][MTP_LAYER] = norms.widths(width)[MTP_LAYER]
    everything = [found.layers, *(units for by_layer in widths.values() for units in by_layer.values())]
    if not all(bool(scores.isfinite().all()) for scores in everything):
        raise InvalidRequest("a score is not finite: the checkpoint or the data makes numbers overflow", param="model")
    return Scores(
        method=settings.method,
        base_digest=base_digest,
        layers=tuple(found.layers.tolist()) if "layers" in settings.kinds else (),
        widths={
            width: {path: tuple(units.tolist()) for path, units in by_layer.items()}
            for width, by_layer in widths.items()
        },
        data=None if calibration is None or settings.method not in NEED_DATA else calibration.record(),
        settings=settings.record(),
    )


def _weights(base: Base, settings: Settings) -> Found:
    norms = WeightNorms(base)
    return Found({width: norms.widths(width) for width in settings.widths}, norms.layers())


def _random(base: Base, settings: Settings) -> Found:
    generator = torch.Generator().manual_seed(settings.seed)

    def drawn(number: int) -> Tensor:
        return torch.rand(number, generator=generator, dtype=torch.float64)

    # All kinds are drawn, so that what one gets does not depend on which others are asked for.
    layers = drawn(base.config.num_layers)
    widths: dict[Width, dict[str, Tensor]] = {
        width: {path: drawn(count(base.config, width)) for path in places(base.config, width, mtp=base.mtp)}
        for width in WIDTHS
    }
    return Found(widths, layers)

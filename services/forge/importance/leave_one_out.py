"""Importance by leaving units out one by one: exact, on a sample of the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.common.jobs.documents import Document
from services.engine.models.interface import CausalLM
from services.engine.models.weights.shards import Progress
from services.forge.compaction import Base
from services.forge.importance.calibration import Calibration
from services.forge.importance.probes import LeaveOut
from services.forge.importance.settings import Found, Settings
from services.forge.units import Kind, Width, count, layer_path
from services.trainer.packing import Microbatch


@dataclass(frozen=True, slots=True)
class _Trial:
    """A forward without one unit."""

    kind: Kind
    layer: str
    unit: int
    columns: Mapping[str, slice]
    """Path of an output projection → columns of the unit."""


def _trials(base: Base, settings: Settings) -> list[_Trial]:
    config = base.config
    found = []
    for width, layer, path in settings.outputs(base.config):
        total = count(config, width)
        size = {"kv_groups": config.query_size, "key_heads": config.value_size, "mlp_channels": total}[width] // total
        found += [_Trial(width, layer, unit, {path: slice(unit * size, (unit + 1) * size)}) for unit in range(total)]
    if "layers" in settings.kinds:
        for index, kind in enumerate(config.layer_types):
            mixer = "self_attn.o_proj" if kind == "full_attention" else "linear_attn.out_proj"
            paths = (f"{layer_path(index)}.{module}" for module in (mixer, "mlp.down_proj"))
            found.append(_Trial("layers", layer_path(index), index, dict.fromkeys(paths, slice(None))))
    return found


def leave_one_out(
    base: Base,
    model: CausalLM,
    calibration: Calibration,
    settings: Settings,
    progress: Progress,
    give_way: Callable[[], None],
) -> Found:
    """Of a unit the rise of the mean loss on a sample without it. Several copies of the sample, each without another
    unit, are one forward."""
    config = base.config
    sample = calibration.sample(settings.sample_tokens)
    tokens = sum(document.length - 1 for document in sample)
    trials = _trials(base, settings)
    copies = max(1, settings.tokens_per_forward // tokens)
    whole = float(_losses(model, sample, [{}], give_way)[0])
    widths: dict[Width, dict[str, Tensor]] = {width: {} for width in settings.widths}
    layers = torch.zeros(config.num_layers, dtype=torch.float64)
    for start in range(0, len(trials), copies):
        chosen = trials[start : start + copies]
        losses = _losses(model, sample, [trial.columns for trial in chosen], give_way)
        for trial, loss in zip(chosen, losses.tolist(), strict=True):
            if trial.kind == "layers":
                layers[trial.unit] = loss - whole
            else:
                empty = torch.zeros(count(config, trial.kind), dtype=torch.float64)
                widths[trial.kind].setdefault(trial.layer, empty)[trial.unit] = loss - whole
        progress("leaving units out", min(start + copies, len(trials)), len(trials))
    return Found(widths, layers)


@torch.no_grad()
def _losses(
    model: CausalLM,
    sample: Sequence[Document],
    left_out: Sequence[Mapping[str, slice]],
    give_way: Callable[[], None] = lambda: None,
) -> Tensor:
    """Mean loss on each copy of the sample, [copies] float64."""
    batch = Microbatch.of([*sample] * len(left_out), model.device)
    tokens = batch.num_tokens // len(left_out)
    places: dict[str, list[tuple[slice, slice]]] = {}
    for index, columns in enumerate(left_out):
        for path, chosen in columns.items():
            places.setdefault(path, []).append((slice(index * tokens, (index + 1) * tokens), chosen))
    hidden = model.forward_probed(batch.token_ids, batch.lengths, LeaveOut(places, give_way))
    logprobs = model.token_logprobs(hidden.index_select(0, batch.rows), batch.targets)
    return -logprobs.double().view(len(left_out), -1).mean(1).cpu()

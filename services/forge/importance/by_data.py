"""Importance by what data does inside the model: activations and gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from services.engine.models.interface import CausalLM
from services.engine.models.weights.shards import Progress
from services.forge.compaction import Base
from services.forge.importance.calibration import Calibration
from services.forge.importance.probes import ActivationProbe, GradientGates
from services.forge.importance.settings import Found, Settings
from services.forge.importance.weight_norms import WeightNorms
from services.forge.units import Width, count, layer_path


def activations(
    base: Base,
    model: CausalLM,
    calibration: Calibration,
    settings: Settings,
    progress: Progress,
    give_way: Callable[[], None],
) -> Found:
    """Of a unit the norm over its columns of ``mean norm of inputs · norm of weights`` (Wanda, arXiv 2306.11695);
    of a layer how far it turns the residual stream."""
    probe = ActivationProbe(give_way)
    done = 0
    with torch.no_grad():
        for batch in calibration.packed(settings.tokens_per_forward, model.device):
            model.forward_probed(batch.token_ids, batch.lengths, probe)
            done += batch.num_tokens
            progress("activations", done, calibration.tokens)
    columns = WeightNorms(base).output_columns()
    widths: dict[Width, dict[str, Tensor]] = {width: {} for width in settings.widths}
    for width, layer, path in settings.outputs(base.config):
        squares = probe.squares[path].cpu() / calibration.tokens * columns[path].square()
        widths[width][layer] = squares.view(count(base.config, width), -1).sum(1).sqrt()
    turns = torch.stack([probe.turns[index] for index in range(base.config.num_layers)]).cpu()
    return Found(widths, turns / calibration.tokens)


def gradients(
    base: Base,
    model: CausalLM,
    calibration: Calibration,
    settings: Settings,
    progress: Progress,
    give_way: Callable[[], None],
) -> Found:
    """Of a unit the sum over tokens of how much, to first order, the loss changes without what it says at that token: a
    trained model's loss hardly has a slope in a unit as a whole. Divided by the number of trained tokens."""
    config = base.config
    widths: dict[Width, dict[str, Tensor]] = {width: {} for width in settings.widths}
    layers = torch.zeros(config.num_layers, dtype=torch.float64)
    done = trained = 0
    for batch in calibration.packed(settings.tokens_per_forward, model.device):
        probe = GradientGates(give_way)
        hidden = model.forward_probed(batch.token_ids, batch.lengths, probe)
        loss = -model.token_logprobs(hidden.index_select(0, batch.rows), batch.targets).sum()
        torch.autograd.backward(loss)
        for width, layer, path in settings.outputs(base.config):
            found = _grad(probe, path).view(batch.num_tokens, count(config, width), -1).sum(2).abs().sum(0)
            widths[width][layer] = widths[width].get(layer, 0) + found
        for index in range(config.num_layers):
            inside = [path for path in probe.gates if path.startswith(f"{layer_path(index)}.")]
            layers[index] += sum(_grad(probe, path).sum(1) for path in inside).abs().sum()  # type: ignore[union-attr]
        done += batch.num_tokens
        trained += len(batch.targets)
        progress("gradients", done, calibration.tokens)
    scaled = {width: {layer: units / trained for layer, units in found.items()} for width, found in widths.items()}
    return Found(scaled, layers / trained)


def _grad(probe: GradientGates, path: str) -> Tensor:
    grad = probe.gates[path].grad
    if grad is None:
        raise ValueError(f"no gradient came to {path}")
    return grad.double().cpu()

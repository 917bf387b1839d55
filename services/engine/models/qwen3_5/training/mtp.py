"""A drafter over packed documents, differentiable in its weights, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kernels.attention import packed_chain
from kernels.rms_norm import rms_norm
from kernels.rope import Rotation
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.qwen3_5.loading.mtp import built
from services.engine.models.qwen3_5.training.plain import PackedStep, bare_layer


def draft_packed(
    tensors: Mapping[str, Tensor],
    hidden: Tensor,
    ids: Sequence[Tensor],
    lengths: Sequence[int],
    config: Qwen3_5Config,
    embedding: Tensor,
    rotation: Rotation,
    *,
    give_way: Callable[[], None],
) -> list[Tensor]:
    """See CausalLM.draft_packed. A row proposes as it would in serving: of a layer's keys and values it sees those
    that were made of hidden states up to its own place, and those that its own chain, or block, has made."""
    weights, eps = built(config, tensors, hidden.dtype), config.rms_norm_eps
    keys: list[list[Tensor]] = [[] for _ in weights.layers]
    values: list[list[Tensor]] = [[] for _ in weights.layers]
    proposed: list[Tensor] = []
    for depth, token_ids in enumerate(ids):
        give_way()
        step = PackedStep.build(lengths, config, rotation, hidden.device, first=depth)

        def attend(q: Tensor, k: Tensor, v: Tensor, index: int, step: PackedStep = step) -> Tensor:
            keys[index].append(k)
            values[index].append(v)
            return packed_chain(q, keys[index], values[index], step.attention)

        tokens = F.embedding(token_ids, embedding)
        if depth and weights.places is not None:
            tokens = weights.places[depth - 1].expand_as(tokens)
        embedded = rms_norm(tokens, weights.embedding_norm, eps)
        x = F.linear(torch.cat((embedded, rms_norm(hidden, weights.hidden_norm, eps)), dim=-1), weights.fc.dense())
        for index, layer in enumerate(weights.layers):
            x = bare_layer(x, layer, config, step, partial(attend, index=index))
        proposed.append(rms_norm(x, weights.final_norm, eps))
        if depth == 0 or weights.places is None:
            hidden = proposed[-1]
    return proposed

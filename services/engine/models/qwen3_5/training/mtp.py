"""The mtp layer over packed documents, differentiable in its weights, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
    """See CausalLM.draft_packed. A row proposes as it would in serving: of the layer's keys and values it sees those
    that were made of hidden states up to its own place, and those that its own chain has made."""
    weights, eps = built(config, tensors, hidden.dtype), config.rms_norm_eps
    keys: list[Tensor] = []
    values: list[Tensor] = []
    proposed: list[Tensor] = []
    for depth, token_ids in enumerate(ids):
        give_way()
        step = PackedStep.build(lengths, config, rotation, hidden.device, first=depth)

        def attend(q: Tensor, k: Tensor, v: Tensor, step: PackedStep = step) -> Tensor:
            keys.append(k)
            values.append(v)
            return packed_chain(q, keys, values, step.attention)

        embedded = rms_norm(F.embedding(token_ids, embedding), weights.embedding_norm, eps)
        x = F.linear(torch.cat((embedded, rms_norm(hidden, weights.hidden_norm, eps)), dim=-1), weights.fc.dense())
        hidden = rms_norm(bare_layer(x, weights.layer, config, step, attend), weights.final_norm, eps)
        proposed.append(hidden)
    return proposed

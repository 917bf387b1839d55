"""Sampled completions as tensors of a checkpoint, and back."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from services.trainer.host.rollouts import Completion


def completion_tensors(prefix: str, completions: Sequence[Completion]) -> dict[str, Tensor]:
    """``prefix`` + token_ids, logprobs, lengths and truncated."""
    tokens = [token for one in completions for token in one.token_ids]
    logprobs = [value for one in completions for value in one.logprobs]
    return {
        f"{prefix}token_ids": torch.tensor(tokens, dtype=torch.int64),
        f"{prefix}logprobs": torch.tensor(logprobs, dtype=torch.float32),
        f"{prefix}lengths": torch.tensor([len(one.token_ids) for one in completions], dtype=torch.int64),
        f"{prefix}truncated": torch.tensor([one.truncated for one in completions], dtype=torch.bool),
    }


def completions_of(prefix: str, tensors: Mapping[str, Tensor]) -> list[Completion]:
    """Completions from the tensors of completion_tensors()."""
    lengths = tensors[f"{prefix}lengths"].tolist()
    return [
        Completion(tuple(tokens.tolist()), array("f", logprobs.tolist()), truncated=bool(truncated))
        for tokens, logprobs, truncated in zip(
            torch.split(tensors[f"{prefix}token_ids"], lengths),
            torch.split(tensors[f"{prefix}logprobs"], lengths),
            tensors[f"{prefix}truncated"].tolist(),
            strict=True,
        )
    ]

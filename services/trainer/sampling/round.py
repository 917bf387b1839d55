"""Rounds of a job that samples: completions with their rewards, and both as tensors of a checkpoint."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.common.jobs import GrpoCompletion, GrpoGroup
from services.common.jobs.kinds.generate import RolloutPrompt
from services.trainer.host.rollouts import Completion


def completion_tensors(prefix: str, completions: Sequence[Completion]) -> dict[str, Tensor]:
    """Tensors of a checkpoint that hold these completions: ``prefix`` + token_ids, logprobs, lengths, truncated."""
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


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """A prompt as tokens, and what it was asked with."""

    token_ids: tuple[int, ...]
    asked: RolloutPrompt


@dataclass(frozen=True, slots=True)
class Round:
    """Round of a job: as many completions of each prompt, prompt by prompt, each with its reward."""

    number: int
    version: int
    """Rounds that the policy which sampled it had been trained on."""
    temperature: float
    prompts: Sequence[ScoredPrompt]
    completions: Sequence[Completion]
    rewards: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.completions) != len(self.rewards) or len(self.completions) % len(self.prompts):
            raise ValueError(
                f"{len(self.completions)} completions and {len(self.rewards)} rewards of {len(self.prompts)} prompts"
            )

    @property
    def size(self) -> int:
        """Completions of each prompt."""
        return len(self.completions) // len(self.prompts)

    def groups(self) -> list[GrpoGroup]:
        """Groups as a client would have posted them."""
        scored = [
            GrpoCompletion(
                token_ids=list(completion.token_ids),
                logprobs=completion.logprobs.tolist(),
                temperature=self.temperature,
                truncated=completion.truncated,
                reward=reward,
            )
            for completion, reward in zip(self.completions, self.rewards, strict=True)
        ]
        return [
            GrpoGroup(
                prompt_token_ids=list(prompt.token_ids), completions=scored[place * self.size : (place + 1) * self.size]
            )
            for place, prompt in enumerate(self.prompts)
        ]

    @property
    def earned(self) -> Sequence[Sequence[float]]:
        """Rewards of the completions of each prompt."""
        return [self.rewards[start : start + self.size] for start in range(0, len(self.rewards), self.size)]

    def metrics(self) -> dict[str, float]:
        """Metrics of the round, however it is trained on."""
        count = len(self.completions)
        behind = float(self.number - self.version)
        return {
            "staleness_mean": behind,
            "staleness_max": behind,
            "frac_reward_zero_std": sum(max(group) == min(group) for group in self.earned) / len(self.earned),
            "completion_length_mean": sum(len(one.token_ids) for one in self.completions) / count,
            "truncated_fraction": sum(one.truncated for one in self.completions) / count,
        }

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and JSON of a checkpoint."""
        tensors = completion_tensors("round.", self.completions) | {
            "round.rewards": torch.tensor(self.rewards, dtype=torch.float64),
        }
        return tensors, {"number": self.number, "version": self.version, "temperature": self.temperature}

    @classmethod
    def of_state(cls, tensors: Mapping[str, Tensor], data: Mapping[str, Any], prompts: Sequence[ScoredPrompt]) -> Round:
        """Round from its state(); ``prompts`` are those of the same round."""
        rewards = tensors["round.rewards"].tolist()
        number = int(data["number"])
        return cls(
            number,
            int(data.get("version", number)),  # earlier releases sampled by the policy as it was
            float(data["temperature"]),
            prompts,
            completions_of("round.", tensors),
            rewards,
        )

"""Rounds of a job that samples: completions with their rewards, and both as tensors of a checkpoint."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from services.common.jobs import GrpoCompletion, GrpoGroup
from services.trainer.host.rollouts import Completion
from services.trainer.sampling.rounds.groups import Group, ScoredPrompt, staleness


def completion_tensors(prefix: str, completions: Sequence[Completion]) -> dict[str, Tensor]:
    """Tensors of a checkpoint that hold these completions: ``prefix`` + token_ids, logprobs, lengths, truncated, and
    where one was cut or says its policies cut, versions, version_tokens, version_counts."""
    tokens = [token for one in completions for token in one.token_ids]
    logprobs = [value for one in completions for value in one.logprobs]
    found = {
        f"{prefix}token_ids": torch.tensor(tokens, dtype=torch.int64),
        f"{prefix}logprobs": torch.tensor(logprobs, dtype=torch.float32),
        f"{prefix}lengths": torch.tensor([len(one.token_ids) for one in completions], dtype=torch.int64),
        f"{prefix}truncated": torch.tensor([one.truncated for one in completions], dtype=torch.bool),
    }
    spans = [span for one in completions for span in one.versions]
    if spans or any(one.cut for one in completions):
        found |= {
            f"{prefix}cut": torch.tensor([one.cut for one in completions], dtype=torch.bool),
            f"{prefix}versions": torch.tensor([version for version, _ in spans], dtype=torch.float64),
            f"{prefix}version_tokens": torch.tensor([count for _, count in spans], dtype=torch.int64),
            f"{prefix}version_counts": torch.tensor([len(one.versions) for one in completions], dtype=torch.int64),
        }
    return found


def completions_of(prefix: str, tensors: Mapping[str, Tensor]) -> list[Completion]:
    """Completions from the tensors of completion_tensors()."""
    lengths = tensors[f"{prefix}lengths"].tolist()
    count = len(lengths)
    cut, counts = [False] * count, [0] * count
    spans: Iterator[tuple[float, int]] = iter(())
    if f"{prefix}cut" in tensors:
        cut, counts = tensors[f"{prefix}cut"].tolist(), tensors[f"{prefix}version_counts"].tolist()
        versions, tokens_by = tensors[f"{prefix}versions"].tolist(), tensors[f"{prefix}version_tokens"].tolist()
        spans = zip(versions, tokens_by, strict=True)
    return [
        Completion(
            tuple(tokens.tolist()),
            array("f", logprobs.tolist()),
            truncated=bool(truncated),
            cut=bool(stopped),
            versions=tuple(islice(spans, several)),
        )
        for tokens, logprobs, truncated, stopped, several in zip(
            torch.split(tensors[f"{prefix}token_ids"], lengths),
            torch.split(tensors[f"{prefix}logprobs"], lengths),
            tensors[f"{prefix}truncated"].tolist(),
            cut,
            counts,
            strict=True,
        )
    ]


Chosen = Callable[[int], Sequence[ScoredPrompt]]
"""Prompts of a round by its number."""


def groups_state(prefix: str, groups: Sequence[Group[Completion]]) -> tuple[dict[str, Tensor], list[dict[str, int]]]:
    """Tensors and JSON of a checkpoint."""
    tensors = completion_tensors(prefix, [one for group in groups for one in group.members])
    said = [
        {"number": one.number, "place": one.place, "size": len(one.members), "requeued": one.requeued} for one in groups
    ]
    return tensors, said


def groups_of(
    prefix: str, tensors: Mapping[str, Tensor], data: Sequence[Mapping[str, int]], chosen: Chosen
) -> list[Group[Completion]]:
    """Groups from their groups_state()."""
    found = iter(completions_of(prefix, tensors))
    return [
        Group(
            said["number"],
            said["place"],
            chosen(said["number"])[said["place"]],
            list(islice(found, said["size"])),
            said["requeued"],
        )
        for said in data
    ]


@dataclass(frozen=True, slots=True)
class Round:
    """Round of a job: groups of completions, each with its reward."""

    number: int
    version: float
    """Rounds that the policy which it began with had been trained on."""
    temperature: float
    sampled: Sequence[Group[Completion]]
    """May be none, if all wait for the next round."""
    rewards: Sequence[Sequence[float]]
    """Of each group, in the order of its members."""

    def __post_init__(self) -> None:
        sizes, scored = [len(one.members) for one in self.sampled], list(map(len, self.rewards))
        if sizes != scored or 0 in sizes:
            raise ValueError(f"groups of {sizes} completions have {scored} rewards")

    @property
    def completions(self) -> list[Completion]:
        """All of them, group by group."""
        return [one for group in self.sampled for one in group.members]

    def groups(self) -> list[GrpoGroup]:
        """Groups as a client would have posted them."""
        return [
            GrpoGroup(
                prompt_token_ids=list(group.prompt.token_ids),
                completions=[
                    GrpoCompletion(
                        token_ids=list(completion.token_ids),
                        logprobs=completion.logprobs.tolist(),
                        temperature=self.temperature,
                        truncated=completion.truncated,
                        reward=reward,
                    )
                    for completion, reward in zip(group.members, rewards, strict=True)
                ],
            )
            for group, rewards in zip(self.sampled, self.rewards, strict=True)
        ]

    @property
    def earned(self) -> list[tuple[int, int, Sequence[float]]]:
        """Rewards of each prompt, by its round and its place there."""
        return [(one.number, one.place, rewards) for one, rewards in zip(self.sampled, self.rewards, strict=True)]

    def metrics(self) -> dict[str, float]:
        """Metrics of the round, however it is trained on."""
        completions = self.completions
        behind = staleness(self.number, self.version, completions)
        if not completions:
            return behind
        return behind | {
            "frac_reward_zero_std": sum(max(group) == min(group) for group in self.rewards) / len(self.rewards),
            "completion_length_mean": sum(len(one.token_ids) for one in completions) / len(completions),
            "truncated_fraction": sum(one.truncated for one in completions) / len(completions),
        }

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and JSON of a checkpoint."""
        tensors, groups = groups_state("round.", self.sampled)
        rewards = torch.tensor([reward for group in self.rewards for reward in group], dtype=torch.float64)
        said = {"number": self.number, "version": self.version, "temperature": self.temperature, "groups": groups}
        return tensors | {"round.rewards": rewards}, said

    @classmethod
    def of_state(cls, tensors: Mapping[str, Tensor], data: Mapping[str, Any], chosen: Chosen) -> Round:
        """Round from its state()."""
        number = int(data["number"])
        groups = data.get("groups")
        if groups is None:  # earlier releases cut nothing: as many of each of its prompts
            count = len(chosen(number))
            size = len(tensors["round.lengths"]) // count
            groups = [{"number": number, "place": place, "size": size, "requeued": 0} for place in range(count)]
        sampled = groups_of("round.", tensors, groups, chosen)
        rewards = iter(tensors["round.rewards"].tolist())
        return cls(
            number,
            float(data.get("version", number)),  # earlier releases sampled by the policy as it was
            float(data["temperature"]),
            sampled,
            [list(islice(rewards, len(group.members))) for group in sampled],
        )

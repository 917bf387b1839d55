"""Groups of episodes that wait for the next round, as data of a checkpoint.

An episode that has come to its end is kept as it was. One that was cut is not there at all: its environment cannot be
stored, so it begins again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import Tensor

from services.common.jobs.kinds.environment import FailureKind
from services.common.text.tokenizer import TextCodec
from services.trainer.sampling.answers import read_answer
from services.trainer.sampling.environments.episodes import Dropped, Episode
from services.trainer.sampling.rounds.groups import Group, ScoredPrompt
from services.trainer.sampling.rounds.round import completion_tensors, completions_of

EpisodeGroup = Group[Episode | Dropped | None]


def episodes_state(prefix: str, groups: Sequence[EpisodeGroup]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Tensors and JSON."""
    ended = [one for group in groups for one in group.members if isinstance(one, Episode)]
    tensors = completion_tensors(prefix, [action for one in ended for action in one.actions])
    said = [
        {
            "number": group.number,
            "place": group.place,
            "requeued": group.requeued,
            "members": [_said(one) for one in group.members],
        }
        for group in groups
    ]
    return tensors, said


def episodes_of(
    prefix: str,
    tensors: Mapping[str, Tensor],
    data: Sequence[Mapping[str, Any]],
    codec: TextCodec,
    chosen: Callable[[int], Sequence[ScoredPrompt]],
    tools: Callable[[ScoredPrompt], Sequence[Mapping[str, Any]]],
) -> list[EpisodeGroup]:
    """Groups from their episodes_state().

    Args:
        tools: those that a prompt is rendered with.
    """
    actions = iter(completions_of(prefix, tensors))
    groups = []
    for group in data:
        prompt = chosen(int(group["number"]))[int(group["place"])]
        members: list[Episode | Dropped | None] = []
        for said in group["members"]:
            failures = () if said is None else tuple(FailureKind(kind) for kind in said["failures"])
            if said is None:
                members.append(None)
            elif "reason" in said:
                members.append(Dropped(failures, said["reason"]))
            else:
                episode = Episode(
                    tuple(said["prompt"]),
                    list(islice(actions, len(said["rewards"]))),
                    [float(reward) for reward in said["rewards"]],
                    [tuple(tokens) for tokens in said["observations"]],
                    truncated=bool(said["truncated"]),
                    state=said.get("state", ""),
                    failures=failures,
                )
                *_, last = episode.actions
                before = episode.tokens[: -len(last.token_ids)]
                episode.answer = read_answer(codec, before, last, tools(prompt))
                members.append(episode)
        groups.append(Group(int(group["number"]), int(group["place"]), prompt, members, int(group["requeued"])))
    return groups


def _said(one: Episode | Dropped | None) -> dict[str, Any] | None:
    if one is None:
        return None
    failures = [kind.value for kind in one.failures]
    if isinstance(one, Dropped):
        return {"failures": failures, "reason": one.reason}
    return {
        "failures": failures,
        "prompt": list(one.prompt),
        "rewards": one.rewards,
        "observations": [list(tokens) for tokens in one.observations],
        "truncated": one.truncated,
        "state": one.state,
    }

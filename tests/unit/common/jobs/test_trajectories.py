"""Trajectories: exact tokens and masks, returns, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from services.common.errors import InvalidRequest
from services.common.jobs import GrpoJob, Trajectory
from services.common.jobs.kinds.rollouts import check_spread
from services.common.jobs.trajectories.credit import Credit
from services.common.jobs.trajectories.documents import trajectory_documents
from services.common.text.tokenizer import TextCodec
from tests.tokenizer_support import qwen_like_tokenizer


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec(qwen_like_tokenizer())


def act(*tokens: int, **fields: Any) -> dict[str, Any]:
    return {"type": "action", "token_ids": list(tokens), **fields}


def see(*tokens: int, **fields: Any) -> dict[str, Any]:
    return {"type": "observation", **({"token_ids": list(tokens)} if tokens else {}), **fields}


def trajectory(*segments: dict[str, Any], **fields: Any) -> Trajectory:
    return Trajectory.model_validate({"segments": list(segments), "reward": 1.0, **fields})


def test_masks_are_exact(codec: TextCodec) -> None:
    given = trajectory(act(7, 8), see(9), act(10), act(11), see(12, 13), act(14))
    (part,) = trajectory_documents(codec, given, 3, prompt=[5, 6])
    assert list(part.document.token_ids) == [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    assert [place for place, flag in enumerate(part.document.trained) if flag] == [2, 3, 5, 6, 9]
    assert [(turn.number, turn.begin, turn.end) for turn in part.turns] == [(0, 2, 4), (1, 5, 6), (2, 6, 7), (3, 9, 10)]
    assert part.document.source == 3


def test_a_context_that_begins_anew_is_another_sequence(codec: TextCodec) -> None:
    given = trajectory(see(5), act(7), see(1, 2, restarts=True), act(8))
    first, second = trajectory_documents(codec, given, 0)
    assert (list(first.document.token_ids), list(second.document.token_ids)) == ([5, 7], [1, 2, 8])
    assert [turn.number for turn in second.turns] == [1]
    with pytest.raises(InvalidRequest, match=r"segments\[1\] restarts a context in which nothing"):
        trajectory_documents(codec, trajectory(see(5), see(1, restarts=True), act(8)), 0)


def test_messages_are_what_the_template_writes_behind_an_answer(codec: TextCodec) -> None:
    asked = [{"role": "user", "content": "hello"}]
    answer = [*codec.encode("hi"), codec.eos_ids[0]]
    reply = {"role": "user", "content": "go on <|im_end|>"}
    given = trajectory(see(messages=asked), act(*answer), see(messages=[reply]), act(9))
    (part,) = trajectory_documents(codec, given, 0, options={"enable_thinking": False})
    turns = [*asked, {"role": "assistant", "content": "hi"}, reply]
    whole = codec.encode_chat(turns, enable_thinking=False)
    # The answer stands as it was sampled, behind the prompt it was sampled from.
    prompt = codec.encode_chat(asked, enable_thinking=False)
    assert list(part.document.token_ids[: len(prompt) + len(answer)]) == prompt + answer
    behind = list(part.document.token_ids[len(prompt) + len(answer) : -1])
    assert behind == whole[len(whole) - len(behind) :]
    assert whole[len(whole) - len(behind) - 1] == codec.eos_ids[0]
    # An answer that was cut off is ended, and its end is not learnt.
    cut = trajectory(see(messages=asked), act(*answer[:-1]), see(messages=[reply]), act(9))
    (ended,) = trajectory_documents(codec, cut, 0, options={"enable_thinking": False})
    assert ended.document.token_ids == part.document.token_ids
    assert ended.document.num_trained == part.document.num_trained - 1


def test_returns_and_what_turns_are_compared_by() -> None:
    assert Credit("turn", 0.5).returns([1.0, 0.0, 4.0]) == [2.0, 2.0, 4.0]
    group = [[0.0, 0.0, 1.0], [0.0]]
    assert Credit("trajectory").compared(group) == [[1.0, 0.0]]
    # A member that ended before counts with the return of its last turn: with a reward at the end both are the same.
    assert Credit("turn").compared(group) == [[1.0, 0.0]] * 3
    assert Credit("turn").spread([[1.0, 0.0], [0.0, 1.0]])
    assert not Credit("trajectory").spread([[1.0, 0.0], [0.0, 1.0]])


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([see(5)], "no action"),
        ([see(5), act(1), see(2)], "no action answers"),
        ([see(5), act(1, logprobs=[-1.0]), see(2), act(3)], "every action has logprobs, or none"),
        ([see(5), act(1, 2, logprobs=[-1.0])], "one entry per token"),
        ([see(5), act(1, logprobs=[-1e39])], "greater than or equal to -1000000000"),
        ([see(5, text="x"), act(1)], "exactly one of token_ids, text, messages"),
    ],
)
def test_half_a_trajectory_is_refused(segments: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        trajectory(*segments)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"groups": [{"trajectories": [{"segments": [see(5), act(1)]}]}]}, "has no reward"),
        ({"groups": [{"trajectories": [{"segments": [act(1)], "reward": 1}]}]}, "begins with an action"),
        (
            {"groups": [{"prompt": "x", "trajectories": [{"segments": [see(5), act(1)], "reward": 1}]}]},
            "begins with an observation, and the group has a prompt",
        ),
        ({"groups": [{"prompt": "x"}]}, "completions or trajectories"),
        (
            {"groups": [{"prompt": "x", "completions": [{"token_ids": [1], "logprobs": [-1e39], "reward": 1}]}]},
            "greater than or equal to -1000000000",
        ),
        (
            {
                "loss_type": "gspo",
                "groups": [
                    {"trajectories": [{"segments": [see(5), act(1), see(2, restarts=True), act(3)], "reward": 1}]}
                ],
            },
            "loss_type gspo has one ratio",
        ),
        (
            {"discount": 0.5, "prompt": "x", "completions": ["a", "b"], "rewards": [1, 0]},
            "discount would do nothing",
        ),
    ],
)
def test_groups_of_trajectories_that_say_too_little_or_too_much(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        GrpoJob.model_validate({"adapter": "a", **fields})


def test_rewards_that_a_discount_makes_equal_are_told_from_equal_ones() -> None:
    late = {"segments": [see(5), act(1), see(2), act(3)], "reward": 1}
    never = {"segments": [see(5), act(1)], "reward": 0}
    groups = GrpoJob.model_validate({"adapter": "a", "groups": [{"trajectories": [late, never]}]}).scored_groups
    check_spread(groups, Credit(discount=0.5))
    with pytest.raises(InvalidRequest, match="all rewards discounted by 0 a turn are equal"):
        check_spread(groups, Credit(discount=0.0))


def test_who_sampled_each_turn_is_known() -> None:
    spans = [{"adapter": "a@2", "tokens": 1}, {"adapter": "a@3", "tokens": 1}]
    walk = [see(5), act(1, adapter="a@1"), see(2), act(3, adapter="a@2"), see(2), act(3, 4, versions=spans)]
    groups = [{"trajectories": [{"segments": walk, "reward": 1}]}]
    job = GrpoJob.model_validate({"adapter": "a", "groups": groups})
    assert {str(version): place for version, place in job.sampled_by.items()} == {
        "a@1": "groups[0].trajectories[0].segments[1].adapter",
        "a@2": "groups[0].trajectories[0].segments[3].adapter",
        "a@3": "groups[0].trajectories[0].segments[5].versions[1].adapter",
    }

"""Trajectories of stored completions over HTTP: exactly the tokens that were sampled and read."""

from __future__ import annotations

from typing import Any

import httpx

from services.common.jobs import GrpoJob, SftJob
from services.common.jobs.training_sessions.calls import ForwardBackward
from services.common.pb import engine_pb2
from tests.unit.gateway.api.training.test_training import publish, refusal
from tests.unit.gateway.conftest import Running


def remember(running: Running, name: str, prompt: list[int], tokens: list[int], **fields: Any) -> None:
    running.engine.rollouts[name] = engine_pb2.Rollout(
        completion_id=name,
        prompt_token_ids=prompt,
        token_ids=tokens,
        sampling_logprobs=[-0.5] * len(tokens),
        temperature=0.5,
        finish_reason=fields.pop("reason", engine_pb2.FINISH_REASON_STOP),
        **fields,
    )


def conversation(running: Running) -> None:
    """Two turns, and a third that was asked with a history written anew."""
    remember(running, "c1", [1, 2], [3, 4], session="walk", ended_at=2.0)
    remember(running, "c2", [1, 2, 3, 4, 5, 6], [7], session="walk", ended_at=3.0)
    remember(running, "c3", [1, 2, 9, 5, 6, 7, 8], [10], ended_at=4.0, reason=engine_pb2.FINISH_REASON_LENGTH)


def submit(http: httpx.Client, *trajectories: dict[str, Any], **fields: Any) -> httpx.Response:
    return http.post("/v1/train/grpo", json={"adapter": "bot", "groups": [{"trajectories": trajectories}], **fields})


def segments(running: Running, answer: httpx.Response) -> list[list[tuple[str, list[int]]]]:
    assert answer.status_code == 202, answer.text
    spec = running.queue.specs[answer.json()["id"]]
    assert isinstance(spec, GrpoJob)
    again = GrpoJob.model_validate_json(spec.model_dump_json())
    (group,) = again.groups or ()
    return [[(one.type, one.token_ids or []) for one in trajectory.segments] for trajectory in group.played]


def test_a_chain_of_completions_is_a_trajectory(running: Running, http: httpx.Client) -> None:
    conversation(running)
    answer = submit(
        http,
        {"completion_ids": ["c1", "c2"], "rewards": [0.5, 0.0], "reward": 1},
        {"session_id": "walk", "reward": 0},
        {
            "reward": 0.25,
            "trace": [
                {"role": "user", "content": "go"},
                {"role": "assistant", "content": "…", "completion_id": "c1", "reward": 1},
                {"role": "tool", "content": "ok", "tool_call_id": "x"},
            ],
        },
    )
    whole = [("observation", [1, 2]), ("action", [3, 4]), ("observation", [5, 6]), ("action", [7])]
    assert segments(running, answer) == [whole, whole, whole[:2]]
    spec = running.queue.specs[answer.json()["id"]]
    (group,) = spec.groups
    assert group.turn_rewards == [[0.5, 1.0], [0.0, 0.0], [1.25]]
    action = group.played[0].actions[0]
    assert (action.logprobs, action.temperature) == ([-0.5, -0.5], 0.5)
    assert [one.adapter for one in group.played[0].actions] == ["base", "base"]


def test_a_turn_that_goes_on_under_another_version_says_which_tokens_are_whose(
    running: Running, http: httpx.Client
) -> None:
    for _ in range(2):
        publish(running, "bot")
    remember(running, "c1", [1, 2], [3, 4], session="walk", ended_at=2.0, adapter="bot@1")
    remember(running, "c2", [1, 2, 3, 4], [5], session="walk", ended_at=3.0, adapter="bot@2")
    remember(running, "c3", [1, 2, 3, 4, 5], [6, 7], session="walk", ended_at=4.0, adapter="bot@2")
    remember(running, "c4", [1, 2, 3, 4, 5, 6, 7, 8], [9], session="walk", ended_at=5.0, adapter="bot@2")
    by_ids = {"completion_ids": ["c1", "c2", "c3", "c4"], "rewards": [0.5, 0.25, 0, 1]}
    answer = submit(http, by_ids, {"session_id": "walk", "reward": 0})
    whole = [("observation", [1, 2]), ("action", [3, 4, 5, 6, 7]), ("observation", [8]), ("action", [9])]
    assert segments(running, answer) == [whole, whole]
    (group,) = running.queue.specs[answer.json()["id"]].groups
    first, last = group.played[0].actions
    assert first.model_dump(exclude_none=True) == {
        "type": "action",
        "token_ids": [3, 4, 5, 6, 7],
        "logprobs": [-0.5] * 5,
        "temperature": 0.5,
        "versions": [{"adapter": "bot@1", "tokens": 2}, {"adapter": "bot@2", "tokens": 3}],
        "reward": 0.75,
    }
    assert (last.adapter, last.versions) == ("bot@2", None)
    assert group.turn_rewards[0] == [0.75, 1.0]
    other = first.model_dump(exclude_none=True)
    opening = {"type": "observation", "token_ids": [1, 2]}
    for changed, says in (
        ({"adapter": "bot@1"}, "adapter and versions both say"),
        ({"versions": [{"adapter": "bot@1", "tokens": 2}]}, "versions name 2 tokens, and the action has 5 token_ids"),
        ({"versions": [{"adapter": "bot", "tokens": 5}]}, "versions"),
        ({"versions": []}, "versions"),
    ):
        error = refusal(submit(http, {"segments": [opening, other | changed], "reward": 1}))
        assert says in error["message"], error
    gone = {"versions": [{"adapter": "bot@1", "tokens": 1}, {"adapter": "bot@9", "tokens": 4}]}
    error = refusal(submit(http, {"segments": [opening, other | gone], "reward": 1}), 404)
    assert error["param"] == "groups[0].trajectories[0].segments[1].versions[1].adapter"
    assert "bot@9, which was never published or is deleted: sample again, or leave `versions` out" in error["message"]


def test_a_chain_that_does_not_go_on_names_the_place(running: Running, http: httpx.Client) -> None:
    conversation(running)
    chain = {"completion_ids": ["c1", "c2", "c3"], "reward": 1}
    other = {"completion_ids": ["c1"], "reward": 0}
    error = refusal(submit(http, chain, other))
    assert error["param"] == "groups[0].trajectories[0]"
    assert "c3 does not go on from c2: of the 7 tokens before it its prompt has the first 2 only" in error["message"]
    answer = submit(http, {**chain, "split": True}, other)
    first, _ = segments(running, answer)
    assert first[-2:] == [("observation", [1, 2, 9, 5, 6, 7, 8]), ("action", [10])]
    trajectory = running.queue.specs[answer.json()["id"]].groups[0].played[0]
    assert (trajectory.restarts, trajectory.truncated) == (True, True)
    error = refusal(submit(http, {**chain, "split": True}, other, loss_type="gspo"))
    assert "loss_type gspo has one ratio" in error["message"]


def test_what_nobody_remembers_is_named(running: Running, http: httpx.Client) -> None:
    conversation(running)
    assert "gone" in refusal(submit(http, {"completion_ids": ["c1", "gone"], "reward": 1}), 404)["message"]
    assert "'nowhere'" in refusal(submit(http, {"session_id": "nowhere", "reward": 1}), 404)["message"]
    for again in ("c1", "c1:0"):  # of an only choice both are the id
        assert "twice" in refusal(submit(http, {"completion_ids": ["c1", again], "reward": 1}))["message"]
        scored = [{"completion_id": "c1", "reward": 1}, {"completion_id": again, "reward": 0}]
        for form in ({"rollouts": scored}, {"groups": [{"completions": scored}]}):
            assert "is scored twice" in refusal(http.post("/v1/train/grpo", json={"adapter": "bot", **form}))["message"]


def test_what_is_remembered_and_is_too_much_is_refused_by_its_place(running: Running, http: httpx.Client) -> None:
    remember(running, "first", [1, 2], [3])
    remember(running, "second", [1, 2, 3], [4])
    remember(running, "nothing", [1, 2], [])
    for number in range(2049):
        remember(running, f"turn-{number}", [1, 2], [3], session="long", ended_at=float(number))
    for trajectory, says in (
        ({"completion_ids": ["first", "second"], "rewards": [1e9, 1e9]}, "reward: Input should be less than"),
        ({"session_id": "long", "split": True, "reward": 1}, "segments: List should have at most 4096 items"),
        ({"completion_ids": ["nothing"], "reward": 1}, "token_ids: List should have at least 1 item"),
    ):
        error = refusal(submit(http, trajectory))
        assert error["param"] == "groups[0].trajectories[0]"
        assert says in error["message"]
    scored = [{"completion_id": name, "reward": reward} for name, reward in (("first", 1), ("nothing", 0))]
    error = refusal(http.post("/v1/train/grpo", json={"adapter": "bot", "rollouts": scored}))
    assert error["param"] == "rollouts[1]"
    error = refusal(http.post("/v1/train/grpo", json={"adapter": "bot", "groups": [{"completions": scored}]}))
    assert error["param"] == "groups[0].completions[1]"


def test_sft_takes_them_too(running: Running, http: httpx.Client) -> None:
    conversation(running)
    examples = [{"trajectory": {"completion_ids": ["c1", "c2"]}}, {"prompt": "2+2", "completion": "4"}]
    body = {"adapter": "bot", "examples": examples, "observation_weight": 0.1}
    answer = http.post("/v1/train/sft", json=body)
    assert answer.status_code == 202, answer.text
    spec = running.queue.specs[answer.json()["id"]]
    assert isinstance(spec, SftJob)
    SftJob.model_validate_json(spec.model_dump_json())
    assert [one.token_ids for one in spec.examples[0].trajectory.segments] == [[1, 2], [3, 4], [5, 6], [7]]
    assert spec.examples[1].prompt == "2+2"
    error = refusal(http.post("/v1/train/sft", json={**body, "examples": examples[1:]}))
    assert "observation_weight would do nothing" in error["message"]


def test_a_session_takes_them_as_data(running: Running, http: httpx.Client) -> None:
    conversation(running)
    session = http.post("/v1/train/sessions", json={}).json()["id"]
    calls = iter(range(1, 99))

    def send(*data: dict[str, Any], **fields: Any) -> httpx.Response:
        body = {"seq": next(calls), "loss": "ppo", "temperature": 0.5, "data": data, **fields}
        return http.post(f"/v1/train/sessions/{session}/forward_backward", json=body)

    stored = {"trajectory": {"completion_ids": ["c1", "c2"]}}
    by_hand = {
        "trajectory": {
            "segments": [
                {"type": "observation", "token_ids": [1, 2]},
                {"type": "action", "token_ids": [3, 4], "logprobs": [-0.5, -0.5], "temperature": 0.5},
                {"type": "observation", "token_ids": [5, 6]},
                {"type": "action", "token_ids": [7], "logprobs": [-0.5], "temperature": 0.5},
            ]
        }
    }
    named = {"trajectory": {"session_id": "walk"}}
    tokens = {"token_ids": [1, 2], "advantages": [0, 1], "logprobs": [0, -1]}
    answer = send(
        {**stored, "advantages": [1, -1]}, {**by_hand, "advantages": [1, -1]}, {**named, "advantages": [2]}, tokens
    )
    assert answer.status_code == 202, answer.text
    call = running.engine.sessions.calls[-1]
    assert isinstance(call, ForwardBackward)
    first, second, third, last = call.data
    assert first == second
    assert first.model_dump(exclude_none=True, exclude_defaults=True) == {
        "token_ids": [1, 2, 3, 4, 5, 6, 7],
        "weights": [0, 0, 1, 1, 0, 0, 1],
        "advantages": [0, 0, 1, 1, 0, 0, -1],
        "logprobs": [0, 0, -0.5, -0.5, 0, 0, -0.5],
    }
    assert (third.advantages, last.token_ids) == ([0, 0, 2, 2, 0, 0, 2], [1, 2])

    supervised: dict[str, Any] = {"loss": "cross_entropy", "temperature": 1}
    assert send({**stored, "action_weight": 0.5, "observation_weight": 0.1}, **supervised).status_code == 202
    call = running.engine.sessions.calls[-1]
    assert isinstance(call, ForwardBackward)
    (datum,) = call.data
    assert (datum.weights, datum.advantages, datum.logprobs) == ([0, 0, 0.5, 0.5, 0.1, 0.1, 0.5], None, None)

    def refused(*data: dict[str, Any], **fields: Any) -> str:
        return str(refusal(send(*data, **fields))["message"])

    assert "needs data[0].advantages" in refused(stored)
    assert "3 entries and the trajectory 2 actions" in refused({**stored, "advantages": [1, 2, 3]})
    assert "sampled at temperature 0.5, and the call's is 1" in refused({**stored, "advantages": [1]}, temperature=1)
    assert "one sequence" in refused({"trajectory": {"session_id": "walk", "split": True}, "advantages": [1]})
    assert "observation_weight is of" in refused({**stored, "advantages": [1], "observation_weight": 1})
    assert "nothing was observed" in refused(
        {"trajectory": {"completion_ids": ["c1"]}, "action_weight": 0, "observation_weight": 1}, **supervised
    )
    assert "does not go on from" in refused({"trajectory": {"completion_ids": ["c1", "c3"]}, "advantages": [1]})
    error = refusal(send({"trajectory": {"completion_ids": ["gone"]}, "advantages": [1]}), 404)
    assert (error["param"], "gone" in error["message"]) == ("data", True)

"""GRPO jobs whose rollouts are episodes in environments, on the engine that serves the tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from benchmarks.training.environments.serving import Fault, FaultyServer, misbehaving, serving
from services.common.errors import InvalidRequest, Unavailable
from services.common.jobs import GrpoJob
from services.common.jobs.scorers.allowed_webhooks import Webhooks
from services.engine.observability.events import EngineEvent, EventStream, StepDone
from services.environments.calculator import Calculator
from services.environments.guess import Guess
from services.trainer.jobs import prepare_run
from services.trainer.jobs.rollouts.episode_run import EpisodeRun
from services.trainer.sampling.environments.episodes import Episode
from services.trainer.sampling.environments.rounds import EpisodeRound
from tests.rollout_support import Pod, running_pod, wait_for
from tests.training_support import through_a_checkpoint
from tests.unit.common.jobs.scorers.test_webhook import SECRET
from tests.unit.common.jobs.scorers.test_webhook import serving as serving_tools

PROMPT = {"prompt": "{observation}"}


def job(url: str, **fields: Any) -> GrpoJob:
    reward = {
        "type": "environment",
        "url": url,
        "max_turns": 2,
        "max_trajectory_tokens": 128,
        "timeout_seconds": 30.0,
        **fields.pop("reward", {}),
    }
    generate = {
        "prompts": [PROMPT, PROMPT],
        "rounds": 2,
        "completions": 4,
        "max_tokens": 4,
        "temperature": 2.0,
        "reward": [reward, *fields.pop("others", ())],
        **fields.pop("generate", {}),
    }
    defaults = {"adapter": "agent", "learning_rate": 1e-3, "lora": {"rank": 4}, "seed": 3}
    return GrpoJob.model_validate(defaults | fields | {"generate": generate})


def prepared(pod: Pod, url: str, **fields: Any) -> EpisodeRun:
    run = prepare_run(job(url, **fields), pod.host, None)
    assert isinstance(run, EpisodeRun)
    return run


@contextmanager
def pod_at(url: str, **settings: Any) -> Iterator[Pod]:
    with running_pod(webhooks=Webhooks(allowed=(url,), secret=SECRET), **settings) as pod:
        yield pod


class Recorded(Guess):
    """A game that keeps what it was asked."""

    asked: list[tuple[int | None, list[str]]]

    def _begin(self, params: Any) -> Any:
        self.said: list[str] = []
        type(self).asked.append((params.seed, self.said))
        return super()._begin(params)

    def _take(self, action: Any) -> Any:
        self.said.append(action["message"])
        return super()._take(action)


def test_episodes_are_learnt_from_as_they_were_played() -> None:
    """The tokens of a trajectory are those that were sampled, between those that the template writes; its rewards are
    those that the environment gave; a group begins in one state; sampler and trainer compute one policy."""
    Recorded.asked = []
    with serving(Recorded) as url, pod_at(url) as pod:
        rendered: list[tuple[str, list[str]]] = []
        # Shares of digits: rewards have spread however the games went.
        others = [{"type": "regex", "pattern": digit, "weight": 0.1} for digit in "24678"]
        run = prepared(pod, url, others=others, generate={"eval_prompts": [PROMPT | {"reset": {"seed": 5}}]})
        first = run.step(0)
        kept = run.round
        assert isinstance(kept, EpisodeRound)
        codec = pod.host.codec
        for group in kept.groups():
            asked = codec.decode(group.prompt_token_ids or (), skip_special=False)
            assert asked.startswith("<|im_start|>user\nWhat number is it, from ")
            for trajectory in group.trajectories or ():
                kinds = [segment.type for segment in trajectory.segments]
                assert kinds == (["action", "observation"] * len(kinds))[: len(kinds)]
                for before, segment in zip(trajectory.segments, trajectory.segments[1:], strict=False):
                    if segment.type == "observation":
                        text = codec.decode(segment.token_ids or (), skip_special=False)
                        # The end of the turn was sampled: an answer that is cut off is the last.
                        assert (before.token_ids or [0])[-1] == codec.eos_ids[0]
                        assert text.startswith("\n<|im_start|>user\n")
                        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
                rendered.append((asked, [codec.decode(action.token_ids).strip() for action in trajectory.actions]))
        assert first["environment_turns"] > 1
        assert first["sampler_trainer_logprob_difference"] < 1e-4
        assert first["environment_dropped"] == first["environment_unequal_starts"] == 0
        assert "eval_reward_before" in first
        # The held-out game has its seed, the members of a group share one, and answers came as they were sampled.
        seeds = [seed for seed, _ in Recorded.asked]
        assert seeds[0] == 5
        assert sorted(seeds[1:].count(seed) for seed in set(seeds[1:])) == [4, 4]
        said = sorted([one.strip() for one in said] for _, said in Recorded.asked[1:])
        cut = first["truncated_fraction"] > 0
        assert cut or said == sorted(answers for _, answers in rendered)
        history = [run.step(index) for index in range(1, run.total_steps)]
        assert "eval_success" in history[-1]
        pod.settle()


def test_a_round_under_way_is_part_of_the_checkpoint() -> None:
    with serving(Guess) as url, pod_at(url) as pod:
        # Which digit was said, so that rewards have spread however the games went.
        others = [{"type": "regex", "pattern": digit, "weight": 0.1 * int(digit)} for digit in "123456789"]
        drawn = {"rounds": 1, "prompts_per_round": 1, "curriculum": {"success_at": 2.0}}
        fields = {"epochs": 2, "generate": drawn, "others": others}
        run = prepared(pod, url, **fields)
        run.step(0)
        state = run.state()
        state = type(state)(state.tensors, json.loads(json.dumps(state.data)))
        after = run.step(1)
        again = prepared(pod, url, **fields)
        assert again.load_state(state) == 1
        assert again.round == run.round
        resumed = again.step(1)
        assert resumed["loss"] == pytest.approx(after["loss"], rel=1e-5)
        assert resumed["environment_turns"] == after["environment_turns"]
        assert resumed["curriculum_known"] == after["curriculum_known"] == 0.5
        assert again.state().data["curriculum"] == run.state().data["curriculum"]
        pod.settle()


@pytest.mark.thorough
def test_rounds_are_played_ahead() -> None:
    """Each by the policy of the round before; one that a checkpoint has not is played again by the same."""
    with serving(Guess) as url, pod_at(url) as pod:
        others = [{"type": "regex", "pattern": digit} for digit in "24678"]
        fields = {"generate": {"rounds": 3, "staleness": 1}, "others": others}
        run = prepared(pod, url, **fields)
        first = run.step(0)
        run.close()
        for planned in run._ahead.planned:
            planned.found = None
        state = through_a_checkpoint(run.state())
        behind = [run.step(1), run.step(2)]
        assert [step["staleness_max"] for step in (first, *behind)] == [0, 1, 1]
        again = prepared(pod, url, **fields)
        assert again.load_state(state) == 1
        resumed = again.step(1)
        assert resumed["loss"] == pytest.approx(behind[0]["loss"], rel=1e-4)
        assert resumed["environment_turns"] == behind[0]["environment_turns"]
        again.close()
        pod.settle()


def test_episodes_that_are_cut_begin_again_in_the_next_round() -> None:
    """Their groups wait, with those that have ended; also over a checkpoint. What is cut at the end is dropped."""
    with serving(Guess) as url, pod_at(url) as pod:
        others = [{"type": "regex", "pattern": digit} for digit in "24678"]
        fields = {"generate": {"rounds": 2, "cut": {"fraction": 0.3}}, "others": others, "reward": {"concurrency": 3}}
        run = prepared(pod, url, **fields)
        first = run.step(0)
        left = run._left[1]
        assert first["groups_waiting"] == len(left) > 0
        assert first["rollouts_requeued"] == sum(one is None for group in left for one in group.members) > 0
        assert any(isinstance(one, Episode) for group in left for one in group.members)
        again = prepared(pod, url, **fields)
        assert again.load_state(through_a_checkpoint(run.state())) == 1
        assert again._left[1] == left
        second = again.step(1)
        kept = again.round
        assert isinstance(kept, EpisodeRound)
        assert {number for number, _, _ in kept.earned} >= {0}
        assert second["rollouts_requeued"] == 0
        learnt = sum(len(rewards) for _, _, rewards in (*(run.round.earned if run.round else ()), *kept.earned))
        assert learnt + second["rollouts_dropped"] == 2 * 2 * 4
        assert second["environment_dropped"] == 0
        assert second["staleness_max"] == 1
        pod.settle()


def test_tools_are_called_between_turns() -> None:
    """The calculator: its calls are made, and what comes back is read as a tool's response. The prompt is prefilled
    once, and of a next turn what is new. With exact_forward the values of all that was sampled are the engine's."""
    tools = [dict(tool) for tool in Calculator.tools]
    prompt = PROMPT | {"tools": tools}
    prefilled: list[int] = []

    def listen(event: EngineEvent) -> None:
        if isinstance(event, StepDone):
            prefilled.append(event.prefill_tokens)

    room = {"max_model_len": 512, "max_train_tokens": 512, "state_snapshots": 64}
    with serving(Calculator) as url, pod_at(url, events=EventStream(listen), **room) as pod:
        run = prepared(
            pod,
            url,
            reward={"max_turns": 4, "max_trajectory_tokens": 400, "concurrency": 1},
            others=[{"type": "regex", "pattern": digit, "weight": 0.1} for digit in "24678"],
            generate={"prompts": [prompt], "rounds": 1, "max_tokens": 40, "temperature": 0.5},
            epochs=2,
            exact_forward=True,
        )
        metrics = run.step(0)
        computed = sum(prefilled)
        kept = run.round
        assert isinstance(kept, EpisodeRound)
        codec = pod.host.codec
        first = (kept.groups()[0].trajectories or [])[0]
        said = codec.decode(first.segments[0].token_ids or (), skip_special=False)
        read = codec.decode(first.segments[1].token_ids or (), skip_special=False)
        played = [member for group in kept.groups() for member in group.trajectories or ()]
        shown = len(kept.groups()[0].prompt_token_ids or ())
        asked = sum(len(one.actions) for one in played)
        seen = sum(len(s.token_ids or ()) for one in played for s in one.segments if s.type == "observation")
        # Beside what was seen, of each next turn also the last token that was sampled has no state yet.
        assert shown < computed <= shown + seen + asked - len(played)
        assert metrics["sampler_trainer_logprob_difference"] == 0
        assert run.step(1)["forward_gap_max"] < 1e-3
        assert said.startswith("<tool_call>\n<function=get_sum>\n<parameter=number>\n")
        assert read.startswith('\n<|im_start|>user\n<tool_response>\n{"result": ')
        pod.settle()


def test_http_tools_and_a_reward_that_reads_the_last_answer() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    with (
        serving_tools(lambda _: (200, {}, b'{"weather": "sunny", "temperature": 20}')) as server,
        pod_at(server.url, max_model_len=512, max_train_tokens=512) as pod,
    ):
        tool = {"name": "get_weather", "description": "Get the current weather in a city.", "parameters": schema}
        fields: dict[str, Any] = {
            "reward": {"url": None, "tools": [tool | {"url": server.url}], "max_trajectory_tokens": 400},
            "others": [{"type": "contains"}, {"type": "regex", "pattern": "degrees", "weight": 0.5}],
            "generate": {
                "prompts": [{"prompt": "What is the weather in Oslo?", "answer": "sunny"}],
                "rounds": 1,
                "max_tokens": 48,
                "temperature": 0.5,
            },
        }
        metrics = prepared(pod, server.url, **fields).step(0)
        assert metrics["environment_turns"] == 2
        assert metrics["reward_mean"] == pytest.approx(1.5)
        assert json.loads(server.seen[0].body)["arguments"] == {"city": "Oslo"}
        pod.settle()


def test_forty_faults_and_nothing_is_trained_on_half_a_turn() -> None:
    """Whatever a server does, the job goes on with the episodes that came to their end."""
    server = FaultyServer(Guess, share=0.25, seed=1)
    with misbehaving(server) as url, pod_at(url) as pod:
        run = prepared(
            pod,
            url,
            reward={"timeout_seconds": 0.5, "attempts": 3, "max_dropped": 0.9, "concurrency": 8},
            generate={"rounds": 4, "completions": 8},
        )
        index, dropped, retried = 0, 0.0, 0.0
        while index < run.total_steps:
            metrics = run.step(index)
            dropped += metrics["environment_dropped"]
            retried += metrics["environment_retried"]
            kept = run.round
            assert isinstance(kept, EpisodeRound)
            for trajectory in (one for group in kept.groups() for one in group.trajectories or ()):
                # Every turn that did not end the episode was answered, and every reward is the game's own.
                assert len(trajectory.segments) == 2 * len(trajectory.actions) - 1
                rewards = [action.reward for action in trajectory.actions]
                assert set(rewards) <= {0.0, 1.0}
                assert trajectory.truncated or rewards[-1] == 1.0 or len(rewards) == 2
            index += 1
        assert server.count >= 20
        assert retried > 0
        assert sum(server.made.values()) >= dropped
        pod.settle()


@pytest.mark.parametrize("fault", [Fault.BROKEN, Fault.NO_JSON])
def test_a_job_ends_with_the_reason_when_too_much_is_dropped(fault: Fault) -> None:
    server = FaultyServer(Guess, share=1.0, seed=1, faults=(fault,))
    with misbehaving(server) as url, pod_at(url) as pod:
        run = prepared(pod, url, reward={"attempts": 1, "max_dropped": 0.5})
        before = run.files("")
        reason = "connection" if fault is Fault.BROKEN else "no JSON"
        with pytest.raises(Unavailable, match=rf"8 of 8 episodes, and max_dropped is 0.5 .*{reason}"):
            run.step(0)
        assert run.files("") == before
        pod.settle()


def test_an_interruption_ends_what_is_under_way() -> None:
    class Cancelled(Exception):
        pass

    server = FaultyServer(Guess, share=1.0, seed=1, faults=(Fault.SILENT,))

    def interrupt() -> None:
        if server.count >= 8:
            raise Cancelled

    with misbehaving(server) as url, pod_at(url) as pod:
        run = prepared(pod, url)
        with pytest.raises(Cancelled):
            run.step(0, interrupt)
        wait_for(lambda: pod.slots_taken() == 0)
        pod.settle()


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"reward": {"url": "http://127.0.0.1:1"}}, r"generate.reward\[0\].url: .*TEMPER_REWARD_WEBHOOKS"),
        ({"generate": {"max_tokens": 1000}}, r"generate.prompts\[0\]"),
    ],
)
def test_what_is_refused_is_named(fields: dict[str, Any], where: str) -> None:
    with pod_at("http://127.0.0.1:2") as pod, pytest.raises(InvalidRequest, match=where):
        prepared(pod, "http://127.0.0.1:2", **fields)

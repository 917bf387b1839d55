"""GRPO jobs whose rounds are cut before their slowest rollouts have ended, on the engine that serves the tiny model."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.errors import TemperError
from services.engine.models.lora.trainable import LoraParams
from services.trainer.host.rollouts import Completion, RolloutRequest, RolloutSampling, ScoreRequest
from services.trainer.jobs.rollouts.completion_run import RolloutRun
from services.trainer.sampling.rounds.changing import ChangingStream
from services.trainer.sampling.rounds.groups import going_on
from services.trainer.sampling.rounds.newest import NewestPolicy, PolicyAt
from services.trainer.sampling.rounds.round import Round
from tests.parity.test_rollout_job import prepared
from tests.parity.test_rounds_ahead import assert_learns_as_stated
from tests.rollout_support import TIMEOUT, Pod
from tests.training_support import Stepped, stepped, without_times

TEMPERATURE = 2.0
PROMPTS = [tuple(range(20 + at, 40 + at)) for at in range(6)]


def cutting(pod: Pod, fraction: float = 0.6, requeues: int = 1, **fields: Any) -> RolloutRun:
    generate = {"rounds": 4, "max_tokens": 32, "cut": {"fraction": fraction, "requeues": requeues}}
    return prepared(pod, generate=generate | fields.pop("generate", {}), **fields)


def taught(pod: Pod, steps: int = 2) -> LoraParams:
    """A policy that is another one than the base."""
    run = prepared(pod, learning_rate=0.1)
    for index in range(steps):
        run.step(index)
    return run.lora.copied("cpu")


def assert_behaviour(
    pod: Pod, policies: Mapping[float, LoraParams], said: Iterable[tuple[tuple[int, ...], Completion]]
) -> None:
    """Each token has the log-probability of the policy that it says, behind its prompt and all that is before it."""
    parts: dict[float, list[tuple[ScoreRequest, list[float]]]] = {}
    for prompt, found in said:
        tokens, begin = found.token_ids, 0
        assert sum(count for _, count in found.versions) == len(tokens) == len(found.logprobs)
        for version, count in found.versions:
            asked = ScoreRequest((*prompt, *tokens[:begin]), tokens[begin : begin + count], TEMPERATURE)
            parts.setdefault(version, []).append((asked, found.logprobs[begin : begin + count].tolist()))
            begin += count
    for version, several in parts.items():
        with pod.host.rollouts.policy(policies[version]) as policy:
            scores = pod.host.rollouts.score([asked for asked, _ in several], policy)
        for (_, logprobs), values in zip(several, scores, strict=True):
            assert values.tolist() == pytest.approx(logprobs, abs=1e-4)


def sampled(rounds: Iterable[Round]) -> list[tuple[tuple[int, ...], Completion]]:
    """Completions of rounds, each with its prompt."""
    return [(group.prompt.token_ids, one) for made in rounds for group in made.sampled for one in group.members]


def test_what_is_cut_is_a_beginning_and_goes_on(pod: Pod) -> None:
    """The same rule cuts at the same tokens; the others are told as they are, those that nobody began included."""
    requests = [RolloutRequest(prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    sampling = RolloutSampling(TEMPERATURE, 40)
    source = pod.host.rollouts
    whole = source.generate(requests, sampling, None)
    lengths = sorted(len(one.token_ids) for one in whole)
    assert lengths[1] < lengths[-1], "some are longer than the second that ends"
    cut, again = (source.generate(requests, sampling, None, cut=lambda ended: ended >= 2) for _ in range(2))
    assert cut == again
    assert sum(not one.cut for one in cut) >= 2
    for one, full in zip(cut, whole, strict=True):
        assert one.token_ids == full.token_ids[: len(one.token_ids)]
        assert one.cut == (len(one.token_ids) < len(full.token_ids))
    policies = {0.0: base_policy(pod), 1.0: taught(pod)}
    rest = [going_on(request, one.by(0.0)) for request, one in zip(requests, cut, strict=True) if one.cut]
    with source.policy(policies[1.0]) as loaded:
        ended = source.generate(rest, sampling, loaded)
    for request, one in zip(rest, ended, strict=True):
        assert not one.cut
        assert request.begun is None or one.token_ids[: len(request.begun.token_ids)] == request.begun.token_ids
        assert len(one.token_ids) <= 40
    assert_behaviour(pod, policies, [(request.prompt, one.by(1.0)) for request, one in zip(rest, ended, strict=True)])
    pod.settle()


def base_policy(pod: Pod) -> LoraParams:
    """An adapter that changes nothing."""
    return prepared(pod).lora.copied("cpu")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("staleness", [0, 1])
def test_groups_wait_until_they_are_whole(pod: Pod, staleness: int) -> None:
    """Every rollout is learnt from once or dropped; each token's behaviour is that of the policy that sampled it."""
    run = cutting(pod, generate={"staleness": staleness}, learning_rate=0.05)
    policies: dict[float, LoraParams] = {}
    rounds, history = [], []
    for number in range(4):
        policies[number] = run.lora.copied("cpu")
        history.append(run.step(number))
        assert isinstance(run.round, Round)
        rounds.append(run.round)
    learnt = [(group.number, group.place, len(group.members)) for made in rounds for group in made.sampled]
    assert len({one[:2] for one in learnt}) == len(learnt), "no group is learnt from twice"
    dropped, requeued = (sum(step[name] for step in history) for name in ("rollouts_dropped", "rollouts_requeued"))
    assert requeued > 0
    assert sum(size for _, _, size in learnt) + dropped == 4 * 2 * 4
    for made, step in zip(rounds, history, strict=True):
        for group in made.sampled:
            assert made.number - 1 <= group.number <= made.number
        assert step["staleness_max"] <= min(made.number, staleness + 1)
        assert step["staleness_mean"] <= step["staleness_max"]
    assert any(len(one.versions) > 1 for made in rounds for one in made.completions)
    assert not any(one.cut for made in rounds for one in made.completions)
    assert_behaviour(pod, policies, sampled(rounds))
    assert history[-1]["rollouts_requeued"] == 0
    assert run.outcome[0].startswith(f"{requeued + dropped:.0f} rollouts were cut by generate.cut: {requeued:.0f} went")
    pod.settle()


def test_gradients_of_tokens_by_several_policies(pod: Pod, tmp_path: Path) -> None:
    run = cutting(pod, learning_rate=0.1)
    for index in range(2):
        run.step(index)
    assert_learns_as_stated(run, 2, tmp_path)
    assert isinstance(run.round, Round)
    assert any(len(one.versions) > 1 for one in run.round.completions)
    run.close()


def test_what_is_dropped_leaves_its_group(pod: Pod) -> None:
    """A group is compared without it; one of a single member has no spread; the curriculum learns what is left."""
    run = cutting(pod, 0.4, 0, generate={"rounds": 2, "curriculum": {}})
    metrics = run.step(0)
    assert isinstance(run.round, Round)
    sizes = [len(group.members) for group in run.round.sampled]
    assert metrics["rollouts_dropped"] == 2 * 4 - sum(sizes) > 0
    assert metrics["rollouts_requeued"] == metrics["groups_waiting"] == 0
    for group, rewards in zip(run.round.groups(), run.round.rewards, strict=True):
        assert [one.reward for one in group.completions] == rewards
    assert metrics["curriculum_known"] == len(sizes) / 4
    assert run.step(1)["staleness_max"] == 0
    run.close()


def test_a_round_whose_groups_all_wait_changes_nothing(pod: Pod) -> None:
    run = cutting(pod, 0.1, generate={"rounds": 2, "prompts_per_round": 1}, seed=2)
    before = run.files("")
    first = run.step(0)
    assert first["groups_waiting"] == 1
    assert first["num_tokens"] == 0
    assert run.files("") == before
    second = run.step(1)
    assert second["groups_waiting"] == 0
    assert isinstance(run.round, Round)
    assert run.round.sampled[0].number == 0
    run.close()


def waiting(pod: Pod, staleness: int) -> RolloutRun:
    """A job whose every round leaves groups to the next one."""
    generate = {"staleness": staleness, "curriculum": {"success_at": 2}}
    return cutting(pod, generate=generate, epochs=2, learning_rate=0.05, seed=4)


@pytest.fixture(scope="module", params=[0, 1])
def straight(shared: Pod, request: pytest.FixtureRequest) -> tuple[int, Stepped]:
    """An undisturbed run of that job, by its staleness."""
    return request.param, stepped(waiting(shared, request.param))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stop", [1, 2, 3, 5, 6])
def test_resume_with_groups_that_wait_is_bitwise(pod: Pod, straight: tuple[int, Stepped], stop: int) -> None:
    staleness, whole = straight
    state = whole.saved[stop - 1]
    assert any(state.data["left"].values()) or state.data["ahead"][0]["round"], "or the round ahead has taken them up"
    second = waiting(pod, staleness)
    assert second.load_state(state) == stop
    for index in range(stop, 8):
        assert without_times(second.step(index)) == whole.curve[index]
    assert second.outcome == (f"{_cut(whole.curve)} rollouts were cut by generate.cut: {_went(whole.curve)}",)
    for left, right in zip(whole.parameters, second.lora.parameters(), strict=True):
        assert torch.equal(left, right)


def _cut(curve: list[dict[str, float]]) -> int:
    return round(sum(step.get("rollouts_dropped", 0) + step.get("rollouts_requeued", 0) for step in curve))


def _went(curve: list[dict[str, float]]) -> str:
    requeued, dropped = (
        round(sum(step.get(name, 0) for step in curve)) for name in ("rollouts_requeued", "rollouts_dropped")
    )
    return f"{requeued} went on in the next round, and {dropped} were dropped"


class Scheduled(NewestPolicy):
    """Newer policies, the next one after so many looks of the sampler."""

    def __init__(self, policies: list[PolicyAt], every: int) -> None:
        super().__init__()
        self._left = list(policies)
        self._every = every
        self._looks = 0

    def after(self, version: float) -> PolicyAt | None:
        self._looks += 1
        if self._left and self._looks % self._every == 0:
            self.offer(self._left.pop(0))
        return super().after(version)


def test_rollouts_under_way_change_their_policy(pod: Pod, tmp_path: Path) -> None:
    """In the middle of their tokens, twice: each token says by which policy it is, the step learns by that, and what
    it is behind is counted."""
    other = taught(pod)
    policies = {0.0: base_policy(pod), 0.25: other, 0.5: taught(pod, 1)}
    fields = {"rounds": 2, "max_tokens": 12, "staleness": 1, "in_flight": "change"}
    run = prepared(pod, generate=fields, learning_rate=0.1)
    run.step(0)
    run.close()
    for planned in run._ahead.planned:
        planned.found = None
        del run._left[planned.number]
    run._newest = Scheduled([PolicyAt(version, policies[version]) for version in (0.25, 0.5)], every=5)
    assert_learns_as_stated(run, 1, tmp_path)
    assert isinstance(run.round, Round)
    assert_behaviour(pod, policies, sampled([run.round]))
    assert {version for one in run.round.completions for version, _ in one.versions} == {0.0, 0.25, 0.5}
    behind = run.round.metrics()
    assert 0.5 < behind["staleness_mean"] < behind["staleness_max"] == 1
    run.close()


@pytest.mark.thorough
def test_a_job_whose_rollouts_change(pod: Pod) -> None:
    """Whatever is under way when a step ends goes on with the policy behind it; never with one of later rounds."""
    fields = {"rounds": 3, "max_tokens": 24, "staleness": 1, "in_flight": "change", "cut": {"fraction": 0.8}}
    rounds: list[Round] = []
    run = prepared(pod, generate=fields, epochs=2, learning_rate=0.05)
    policies: dict[float, LoraParams] = {0.0: run.lora.copied("cpu")}
    changed = 0.0
    for index in range(run.total_steps):
        metrics = run.step(index)
        changed += metrics.get("rollouts_changed", 0)
        policies[(index + 1) / 2] = run.lora.copied("cpu")
        if index % 2:
            continue
        assert isinstance(run.round, Round)
        assert 0 <= metrics["staleness_mean"] <= metrics["staleness_max"] <= 2
        rounds.append(run.round)
    assert_behaviour(pod, policies, sampled(rounds))
    assert [note for note in run.outcome if "newer policy" in note] == (
        [f"{changed:.0f} times a rollout under way went on with a newer policy"] if changed else []
    )
    run.close()
    pod.settle()


def test_a_stream_changes_its_policy(pod: Pod) -> None:
    """Of episodes: an answer in the middle goes on, one that is asked for afterwards is by the new policy alone."""
    policies = {0.0: base_policy(pod), 1.0: taught(pod)}
    stream = ChangingStream(pod.host.rollouts, TEMPERATURE, frozenset(), None, lambda: None)
    stream.use(PolicyAt(0.0, policies[0.0]))
    found: dict[int, Completion] = {}
    changed = threading.Condition()

    def ask(at: int, max_tokens: int) -> None:
        def done(one: Completion | TemperError) -> None:
            assert isinstance(one, Completion)
            with changed:
                found[at] = one
                changed.notify_all()

        stream.submit(RolloutRequest(PROMPTS[at], at), max_tokens, done)

    for at in range(4):
        ask(at, 60)
    ask(4, 2)
    with changed:
        assert changed.wait_for(lambda: 4 in found, TIMEOUT)
    stream.use(PolicyAt(1.0, policies[1.0]))
    ask(5, 4)
    with changed:
        assert changed.wait_for(lambda: len(found) == 6, TIMEOUT)
    assert stream.changed == sum(len(one.versions) > 1 for one in found.values()) > 0
    assert [version for version, _ in found[5].versions] == [1.0]
    stream.close()
    assert_behaviour(pod, policies, [(PROMPTS[at], one) for at, one in found.items()])
    pod.settle()

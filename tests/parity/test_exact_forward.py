"""GRPO with the sampler's own log-probabilities (exact_forward), on the engine that serves the tiny trained model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from services.common.adapters.names import AdapterVersion
from services.common.errors import InvalidRequest
from services.common.jobs import GrpoJob
from services.trainer.host.rollouts import RolloutSampling
from services.trainer.jobs import prepare_run
from services.trainer.jobs.grpo_run import GrpoRun
from services.trainer.jobs.rollouts.completion_run import RolloutRun
from services.trainer.sampling.replay import replay
from tests.parity.test_rollout_job import job, raising_after
from tests.parity.test_rollouts import adapter, requests
from tests.rollout_support import Pod, running_pod, wait_for
from tests.training_support import Stepped, stepped, through_a_checkpoint, without_times

SHORT = RolloutSampling(3.0, 12)
SPREAD = {"rounds": 2, "completions": 6, "max_tokens": 10, "temperature": 3.0}
"""Enough completions that no group's rewards are all equal, so that every step has something to learn."""
AGREEMENT = ("sampler_trainer_logprob_difference", "sampler_trainer_kl", "sampler_trainer_ratio_outside")


def sampling(pod: Pod, **fields: Any) -> RolloutRun:
    run = prepare_run(job(**{"exact_forward": True, **fields}), pod.host, None)
    assert isinstance(run, RolloutRun)
    return run


def posted(
    pod: Pod, *, parent: Any = None, sampler: Any = None, recorded: bool = True, **fields: Any
) -> tuple[GrpoRun, list[list[float]]]:
    """A job on three groups of rollouts, with what their sampler said of each."""
    asked = requests(pod, 3, each=4)
    found = pod.host.rollouts.generate(asked, SHORT, sampler)
    groups: list[dict[str, Any]] = []
    for number, (one, completion) in enumerate(zip(asked, found, strict=True)):
        if number % 4 == 0:
            groups.append({"prompt_token_ids": list(one.prompt), "completions": []})
        groups[-1]["completions"].append(
            {
                "token_ids": list(completion.token_ids),
                "temperature": SHORT.temperature,
                "truncated": completion.truncated,
                "reward": float(number % 4) - len(completion.token_ids) / 50,
                **({"logprobs": completion.logprobs.tolist()} if recorded else {}),
            }
        )
    defaults = {"adapter": "a", "learning_rate": 0.01, "exact_forward": True}
    lora = {} if parent else {"rank": 4}
    run = prepare_run(GrpoJob.model_validate({**defaults, "groups": groups, "lora": lora, **fields}), pod.host, parent)
    assert isinstance(run, GrpoRun)
    return run, [one.logprobs.tolist() for one in found]


def test_a_round_that_was_sampled_when_the_step_was_interrupted_is_told_and_trained_on(pod: Pod) -> None:
    """Also behind a checkpoint: here the engine is asked for the base's values behind it."""

    class Interrupted(Exception):
        pass

    fields: dict[str, Any] = {"beta": 0.1, "generate": {**SPREAD, "rounds": 1, "eval_prompts": ["What is 1 + 1?"]}}
    straight = sampling(pod, **fields)
    wanted = straight.step(0)
    assert {"eval_reward_before", "sampling_seconds", "waiting_seconds", "round"} <= wanted.keys()
    run = sampling(pod, **fields)

    def interrupt() -> None:
        if run.round is not None:
            raise Interrupted

    with pytest.raises(Interrupted):
        run.step(0, interrupt)
    state = run.state()
    assert state.under_way
    again = sampling(pod, **fields)
    assert again.load_state(through_a_checkpoint(state)) == 0
    found = again.step(0)
    assert (found["sampling_seconds"], found["eval_reward_before"]) == (
        state.data["found"]["sampling_seconds"],
        wanted["eval_reward_before"],
    )
    assert without_times(found) == without_times(wanted)
    assert all(torch.equal(*both) for both in zip(straight.lora.parameters(), again.lora.parameters(), strict=True))


def test_the_first_step_of_a_round_is_exactly_on_policy(pod: Pod) -> None:
    """What was sampled is what is trained on, to the bit, in every round; so nothing is decoded again there."""
    run = sampling(pod, epochs=2, groups_per_step=1, generate=SPREAD)
    history = [run.step(index) for index in range(run.total_steps)]
    first, later = history[::4], [step for index, step in enumerate(history) if index % 4]
    for step in first:
        assert step["ratio_mean"] == 1.0
        assert step["behaviour_kl"] == 0.0
        assert step["clip_fraction_low"] == step["clip_fraction_high"] == 0.0
        assert [step[name] for name in AGREEMENT] == [0.0] * 3
        assert "replay_seconds" not in step
        assert 0 < step["forward_gap_mean"] <= step["forward_gap_max"] < 1e-3
    for step in later:
        assert step["replay_seconds"] > 0
        assert step["forward_gap_mean"] < 1e-4
        assert abs(step["behaviour_kl"]) > 1e-7
        assert not set(AGREEMENT) & step.keys()


def test_later_steps_have_the_engines_values(pod: Pod) -> None:
    """Of the adapter as it is then: asked apart, with the same completions in each step, the engine says those bits."""
    run = sampling(pod, epochs=3, generate={"rounds": 1})
    run.step(0)
    said = []
    for index in (1, 2):
        trained = sorted(document.source for document in run.batch(index))
        expected = replay(pod.host, [run._rollouts[at] for at in trained], run.lora, lambda: None)
        run.step(index)
        assert run._values.keys() == expected.keys()
        assert all(torch.equal(run._values[at], values) for at, values in expected.items())
        said.append(torch.cat(list(expected.values())))
    assert not torch.equal(*said)


def test_it_learns_what_the_ordinary_mode_learns(pod: Pod) -> None:
    """In float32 the two forwards differ by rounding."""
    fields = {"epochs": 2, "generate": {"rounds": 2}, "learning_rate": 1e-3}
    exact, ordinary = sampling(pod, **fields), sampling(pod, exact_forward=False, **fields)
    for index in range(2):
        mine, theirs = exact.step(index), ordinary.step(index)
        for name in ("loss", "ratio_mean", "grad_norm", "reward_mean"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), (index, name)
        assert "forward_gap_mean" not in theirs
    for mine, theirs in zip(exact.lora.parameters(), ordinary.lora.parameters(), strict=True):
        assert float((mine - theirs).detach().abs().max()) < 1e-4


@pytest.fixture(scope="module")
def straight(shared: Pod) -> Stepped:
    """An undisturbed run, once."""
    return stepped(sampling(shared, epochs=2, groups_per_step=1, generate=SPREAD, beta=0.1))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stop", [6, 4])  # within a round, and between two
def test_resume_is_bitwise(pod: Pod, straight: Stepped, stop: int) -> None:
    curve, parameters, saved = straight
    state = saved[stop - 1]
    kept = any(name.startswith("reference.") for name in state.tensors)
    assert kept == (stop % 4 != 0)
    second = sampling(pod, epochs=2, groups_per_step=1, generate=SPREAD, beta=0.1)
    assert second.load_state(state) == stop
    for index in range(stop, 8):
        assert without_times(second.step(index)) == curve[index]
    for left, right in zip(parameters, second.lora.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.thorough
def test_an_interrupted_replay_has_not_happened(pod: Pod) -> None:
    fields: dict[str, Any] = {"epochs": 2, "generate": {"rounds": 1, "max_tokens": 32, "completions": 6}, "beta": 0.1}
    whole = sampling(pod, **fields)
    curve = [without_times(whole.step(index)) for index in range(2)]
    run = sampling(pod, **fields)
    run.step(0)
    before = run.state()
    for looks in range(3):
        with raising_after(looks) as interrupt:
            run.step(1, interrupt)
        wait_for(lambda: pod.slots_taken() == 0)
        wait_for(lambda: pod.engine.loop.status().background == 0)
        after = run.state()
        assert before.tensors.keys() == after.tensors.keys()
        assert all(torch.equal(before.tensors[name], after.tensors[name]) for name in before.tensors)
    assert without_times(run.step(1)) == curve[1]


def test_the_kl_is_between_two_policies_of_the_engine(pod: Pod) -> None:
    """A new adapter is the base: not only nearly, whoever shares the steps."""
    run = sampling(pod, beta=0.2, generate={"rounds": 1})
    step = run.step(0)
    assert step["kl"] < 1e-9
    assert step["replay_seconds"] > 0
    learnt = {at for at, rollout in enumerate(run._rollouts) if not rollout.masked}
    assert run._reference.keys() == learnt
    moved, _ = posted(pod, parent=adapter(pod, 1).to_files(""), beta=0.2)
    base = replay(pod.host, moved._rollouts, None, lambda: None)
    metrics = moved.step(0)
    assert all(torch.equal(moved._reference[at], values) for at, values in base.items())
    difference = torch.cat([base[at] - moved._values[at] for at in sorted(base)])
    assert metrics["kl"] == pytest.approx(float((difference.exp() - difference - 1).mean()), rel=1e-4)
    assert metrics["kl"] > 1e-2


@pytest.mark.thorough
def test_posted_rollouts_of_the_policy_are_decoded_again(pod: Pod) -> None:
    """What they came with is compared with what the engine says now, not taken for it."""
    run, _ = posted(pod, epochs=2)
    first, second = run.step(0), run.step(1)
    assert first["replay_seconds"] > 0
    assert first["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert first["sampler_trainer_logprob_difference"] < 1e-5
    assert first["forward_gap_mean"] < 1e-4
    assert second["replay_seconds"] > 0
    assert abs(second["behaviour_kl"]) > 1e-6
    assert not run._start


@pytest.mark.thorough
def test_posted_rollouts_of_another_version(pod: Pod) -> None:
    version = AdapterVersion("other", 1)
    pod.registry.versions[version] = adapter(pod, 2).to_files("tiny")
    parent = adapter(pod, 1).to_files("")
    run, said = posted(pod, parent=parent, sampler=version, epochs=2)
    now = replay(pod.host, run._rollouts, run.lora, lambda: None)
    metrics = run.step(0)
    ratios = torch.cat([(now[at] - torch.tensor(said[at])).exp() for at in sorted(now)])
    assert metrics["ratio_mean"] == pytest.approx(float(ratios.mean()), rel=1e-4)
    assert metrics["sampler_trainer_logprob_difference"] > 1e-2
    # The correction weighs by the same ratios, and what is clipped is then against the starting policy.
    corrected, _ = posted(pod, parent=parent, sampler=version, epochs=2, mismatch_correction="token_truncate")
    metrics = corrected.step(0)
    assert metrics["ratio_mean"] == 1.0
    assert metrics["mismatch_weight_mean"] == pytest.approx(float(ratios.clamp(max=3.0).mean()), rel=1e-4)
    assert corrected.step(1)["mismatch_weight_mean"] == metrics["mismatch_weight_mean"]


@pytest.mark.parametrize("steps", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_rollouts_without_logprobs_start_at_a_ratio_of_one(pod: Pod, steps: int) -> None:
    run, _ = posted(pod, recorded=False, epochs=steps)
    metrics = run.step(0)
    assert metrics["recomputed_rollouts"] == 12
    assert metrics["ratio_mean"] == 1.0
    assert metrics["behaviour_kl"] == 0.0
    assert not set(AGREEMENT) & metrics.keys()
    assert len(run._start) == (0 if steps == 1 else 12)
    state = through_a_checkpoint(run.state())
    if steps > 1:
        resumed, _ = posted(pod, recorded=False, epochs=steps)
        resumed.load_state(state)
        assert without_times(resumed.step(1)) == without_times(run.step(1))
        assert without_times(resumed.step(2)) == without_times(run.step(2))


def test_what_the_engine_cannot_hold_is_refused() -> None:
    with running_pod(max_model_len=40) as pod:
        groups = [
            {
                "prompt_token_ids": [5] * 30,
                "completions": [{"token_ids": [6] * size, "reward": float(size)} for size in (4, 11)],
            }
        ]
        spec = {"adapter": "a", "groups": groups, "lora": {"rank": 4}}
        prepare_run(GrpoJob.model_validate(spec), pod.host, None)
        with pytest.raises(InvalidRequest, match=r"groups\[0\].completions\[1\]: a prompt of 30 tokens leaves room"):
            prepare_run(GrpoJob.model_validate(spec | {"exact_forward": True}), pod.host, None)


def test_a_correction_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="mismatch_correction would do nothing here: with exact_forward"):
        job(exact_forward=True, mismatch_correction="token_mask")


def test_the_engine_that_ends_ends_the_step(pod: Pod) -> None:
    """As rollouts do: the job is tried again elsewhere."""
    run = sampling(pod, epochs=2, generate={"rounds": 1})
    run.step(0)
    with running_pod() as other:
        other.engine.loop.drain(0.0)
        run._host = other.host
        before = run.state()
        with pytest.raises(Exception, match="draining"):
            run.step(1)
    assert all(torch.equal(before.tensors[name], value) for name, value in run.state().tensors.items())
    run._host = pod.host
    assert "replay_seconds" in run.step(1)


def test_prompts_are_what_was_sampled_behind(pod: Pod) -> None:
    """The tokens of a document are put apart where its prompt ends."""
    run, _ = posted(pod)
    asked: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    class Listening:
        def score(self, requests: Any, policy: Any, **options: Any) -> Any:
            asked.extend((one.prompt, one.completion) for one in requests)
            return pod.host.rollouts.score(requests, policy, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(pod.host.rollouts, name)

    class Host:
        rollouts = Listening()

        def __getattr__(self, name: str) -> Any:
            return getattr(pod.host, name)

    replay(Host(), run._rollouts, None, lambda: None)  # type: ignore[arg-type]
    assert [prompt for prompt, _ in asked] == [one.prompt for one in requests(pod, 3, each=4)]
    assert all(completion for _, completion in asked)

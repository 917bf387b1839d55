"""GRPO jobs on a random model: the behaviour policy, skipped groups, accumulation, resume, reward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from services.common.errors import InvalidRequest
from services.common.jobs import GrpoJob
from services.trainer.jobs import prepare_run
from services.trainer.jobs.grpo_run import GrpoRun
from tests.training_support import TrainingHost, gradients, random_adapter, without_times

TEXTS = ["The answer is 4.", "4", "five", "I do not know", ""]


def job(**fields: Any) -> GrpoJob:
    defaults = {"adapter": "a", "learning_rate": 0.01, "lora": {"rank": 4}, "max_tokens_per_microbatch": 128}
    return GrpoJob.model_validate(defaults | fields)


def prepared(host: TrainingHost, parent: dict[str, bytes] | None = None, **fields: Any) -> GrpoRun:
    run = prepare_run(job(**fields), host, parent)
    assert isinstance(run, GrpoRun)
    return run


def sampled(
    host: TrainingHost, run: GrpoRun | None, prompts: list[list[int]], *, seed: int, temperature: float
) -> list[tuple[list[int], list[float]]]:
    """Six token ids a prompt and their sampling log-probabilities, one token at a time as an engine does it."""
    generator = torch.Generator().manual_seed(seed)
    texts = [list(prompt) for prompt in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    for _ in range(6):
        lengths = [len(text) for text in texts]
        with torch.no_grad():
            hidden = host.model.forward_train(
                torch.tensor([token for text in texts for token in text]),
                lengths,
                run.lora if run else None,
                recompute="none",
                give_way=lambda: None,
            )
            last = hidden[torch.tensor(lengths).cumsum(0) - 1]
            distributions = (host.model.logits(last) / temperature).log_softmax(-1)
        drawn = torch.multinomial(distributions.exp(), 1, generator=generator)
        for row, token in enumerate(drawn[:, 0].tolist()):
            texts[row].append(token)
            logprobs[row].append(float(distributions[row, token]))
    return [(text[len(prompt) :], part) for text, prompt, part in zip(texts, prompts, logprobs, strict=True)]


def token_groups(
    host: TrainingHost, run: GrpoRun | None, count: int, *, seed: int = 0, temperature: float = 1.0, size: int = 4
) -> list[dict[str, Any]]:
    """Groups whose reward is the share of tokens on one side of a plane through the embeddings."""
    direction = torch.randn(1, host.model.config.hidden_size, generator=torch.Generator().manual_seed(7))
    liked = host.model.logits(direction)[0] > 0
    prompts = [host.codec.encode(f"question {number}") for number in range(count)]
    drawn = sampled(host, run, [prompt for prompt in prompts for _ in range(size)], seed=seed, temperature=temperature)
    completions = [
        {
            "token_ids": ids,
            "logprobs": logprobs,
            "reward": float(liked[ids].float().mean()),
            "temperature": temperature,
            "truncated": True,
        }
        for ids, logprobs in drawn
    ]
    return [
        {"prompt_token_ids": prompt, "completions": completions[number * size : (number + 1) * size]}
        for number, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_first_ratio_is_one(host: TrainingHost, temperature: float) -> None:
    run = prepared(host, groups=token_groups(host, None, 2, temperature=temperature))
    metrics = run.step(0)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-3)
    assert metrics["behaviour_kl"] < 1e-6
    assert metrics["clip_fraction_low"] == metrics["clip_fraction_high"] == 0
    assert metrics["recomputed_rollouts"] == 0
    assert metrics["tokens"] == 48
    assert "kl" not in metrics


def test_a_temperature_that_is_not_the_rollouts_shows_in_the_ratio(host: TrainingHost) -> None:
    groups = token_groups(host, None, 2, temperature=0.5)
    for group in groups:
        for completion in group["completions"]:
            completion["temperature"] = 1.0
    # The mean of an importance ratio is 1 whatever the policies are, so the drift is what tells.
    assert prepared(host, groups=groups).step(0)["behaviour_kl"] > 1e-2


def test_mixed_temperatures_in_one_microbatch(host: TrainingHost) -> None:
    groups = token_groups(host, None, 1) + token_groups(host, None, 1, temperature=0.6, seed=1)
    metrics = prepared(host, groups=groups).step(0)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-3)


def test_training_raises_the_reward(host: TrainingHost) -> None:
    parent: dict[str, bytes] | None = None
    run = None
    means: list[float] = []
    for number in range(6):
        groups = token_groups(host, run, 4, seed=number, size=8)
        run = prepared(host, parent, groups=groups, learning_rate=0.02, epochs=3, lora={} if parent else {"rank": 4})
        history = [run.step(index) for index in range(3)]
        means.append(history[0]["reward_mean"])
        parent = dict(run.lora.to_files("base"))
    assert means[-1] > means[0] + 0.2, means


def test_the_simple_form(host: TrainingHost) -> None:
    rewards = [1.0, 0.8, 0.0, 0.1, 0.0]
    run = prepared(host, prompt="What is 2 + 2?", completions=TEXTS, rewards=rewards, epochs=3)
    assert run.total_steps == 3
    prompt = host.codec.encode_chat([{"role": "user", "content": "What is 2 + 2?"}])
    for document, text in zip(run.batch(0), TEXTS, strict=True):
        sampled = host.codec.encode_completion(text) or [host.codec.eos_ids[0]]
        assert list(document.token_ids) == [*prompt, *sampled]
        assert document.num_trained == document.length - len(prompt)
    assert any(
        f"{sum(map(bool, TEXTS))} completions are texts that do not say whether they ended" in note
        for note in run.notes
    )
    history = [run.step(index) for index in range(3)]
    assert history[0]["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert history[0]["recomputed_rollouts"] == 5
    assert history[0]["reward_mean"] == pytest.approx(0.38)
    assert history[0]["reward_std"] == pytest.approx(0.4817, abs=1e-4)
    assert abs(history[2]["ratio_mean"] - 1) > 1e-3
    assert any("behaviour=recomputed for 5 of 5" in note for note in run.notes)


def test_a_single_step_needs_no_second_pass(host: TrainingHost) -> None:
    run = prepared(host, prompt="q", completions=TEXTS[:2], rewards=[1.0, 0.0])
    assert host.gate.entered == 0
    assert run.step(0)["ratio_mean"] == 1.0


def test_recomputed_behaviour_is_of_the_starting_policy(host: TrainingHost) -> None:
    parent = random_adapter(host)
    groups = token_groups(host, None, 3)
    for group in groups:
        for completion in group["completions"]:
            del completion["logprobs"]
    run = prepared(host, parent, groups=groups, groups_per_step=1, lora={}, max_tokens_per_microbatch=24)
    assert run.total_steps == 3
    first = run.step(0)
    later = run.step(1)
    assert first["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert abs(later["behaviour_kl"]) > 1e-6


def test_groups_without_spread_are_skipped(host: TrainingHost) -> None:
    groups = token_groups(host, None, 2)
    for completion in groups[0]["completions"]:
        completion["reward"] = 0.25
    run = prepared(host, groups=groups)
    assert run.notes == ("1 of 2 groups skipped: all rewards in them are equal",)
    metrics = run.step(0)
    assert metrics["groups_skipped"] == 1
    assert metrics["tokens"] == 24
    with pytest.raises(InvalidRequest, match="nothing to learn: in each of the 1 groups all rewards are equal"):
        prepared(host, groups=groups[:1])
    with pytest.raises(InvalidRequest, match="nothing to learn"):
        prepared(host, prompt="q", completions=["a"], rewards=[1.0])


@pytest.mark.parametrize("beta", [0.0, 0.2])
def test_gradients_do_not_depend_on_the_microbatches(host: TrainingHost, beta: float) -> None:
    parent = random_adapter(host)
    groups = token_groups(host, None, 3)
    results = []
    for limit in (16, 32, 512):
        run = prepared(host, parent, groups=groups, beta=beta, lora={}, max_tokens_per_microbatch=limit)
        metrics, _ = run._accumulate(0, lambda: None)
        results.append((metrics, gradients(run.lora)))
    for metrics, found in results[:2]:
        assert metrics == pytest.approx(results[2][0], rel=1e-4, abs=1e-6)
        for name, wanted in results[2][1].items():
            assert float((found[name] - wanted).norm()) <= 1e-4 * float(wanted.norm()) + 1e-9, name
    assert ("kl" in results[0][0]) == (beta > 0)


@pytest.mark.parametrize("stop", range(1, 4))
def test_resume_at_every_step_is_bitwise(host: TrainingHost, stop: int) -> None:
    groups = token_groups(host, None, 2)
    for completion in groups[1]["completions"]:
        del completion["logprobs"]
    fields: dict[str, Any] = {"groups": groups, "groups_per_step": 1, "epochs": 2, "beta": 0.1}
    straight = prepared(host, **fields)
    curve = [straight.step(index) for index in range(straight.total_steps)]
    first = prepared(host, **fields)
    for index in range(stop):
        first.step(index)
    state = first.state()
    second = prepared(host, **fields)
    assert second.load_state(state) == stop
    for index in range(stop, 4):
        found = second.step(index)
        assert without_times(found) == without_times(curve[index])
    for left, right in zip(straight.lora.parameters(), second.lora.parameters(), strict=True):
        assert torch.equal(left, right)


def test_no_token_is_learnt_that_may_not_have_been_sampled(host: TrainingHost) -> None:
    """The end of a text's turn, by what is said of the text; in the simple form and in groups alike."""
    flags, rewards = [False, True, True, False, False], [1.0, 0.8, 0.0, 0.1, 0.0]
    simple = prepared(host, prompt="q", completions=TEXTS, rewards=rewards, truncated=flags, temperature=0.5, epochs=1)
    members = [
        {"text": text, "reward": reward, "truncated": flag, "temperature": 0.5}
        for text, reward, flag in zip(TEXTS, rewards, flags, strict=True)
    ]
    grouped = prepared(host, groups=[{"prompt": "q", "completions": members}], epochs=1)
    for run in (simple, grouped):
        for document, text, cut in zip(run.batch(0), TEXTS, flags, strict=True):
            sampled = host.codec.encode_completion(text) + ([] if cut else [host.codec.eos_ids[0]])
            assert list(document.token_ids[-document.num_trained :]) == sampled
        assert not any("whether they ended" in note for note in run.notes)
    found = simple.step(0)
    assert found["truncated_fraction"] == pytest.approx(0.4)
    assert without_times(found) == without_times(grouped.step(0))
    empty = prepared(host, prompt="q", completions=["", "a"], rewards=[1.0, 0.0])
    assert [document.num_trained for document in empty.batch(0)] == [1, len(host.codec.encode_completion("a"))]
    masked = prepared(host, prompt="q", completions=TEXTS, rewards=rewards, truncated=flags, mask_truncated=True)
    assert any("2 of 5 rollouts are truncated" in note for note in masked.notes)


def test_bad_rollouts_are_named(host: TrainingHost) -> None:
    groups = token_groups(host, None, 2)
    groups[1]["completions"][2]["token_ids"][0] = 10**6
    with pytest.raises(InvalidRequest, match=r"groups\[1\].completions\[2\].*vocabulary of 416"):
        prepared(host, groups=groups)
    groups = token_groups(host, None, 1)
    host.max_train_tokens = 8
    with pytest.raises(InvalidRequest, match=r"groups\[0\].completions\[0\] has 1\d tokens .* engine's limit of 8"):
        prepared(host, groups=groups)
    host.max_train_tokens = 512
    empty = {"prompt": "q", "completions": [{"text": "", "truncated": True, "reward": 1}, {"text": "a", "reward": 0}]}
    with pytest.raises(InvalidRequest, match=r"completions\[0\]: has no tokens"):
        prepared(host, groups=[empty])
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    with pytest.raises(InvalidRequest, match=r"groups\[0\].completions\[0\]: .*never closes it"):
        prepared(host, prompt="q", completions=["a", "b"], rewards=[0.0, 1.0], **thinking)
    for unresolved in (
        {"rollouts": [{"completion_id": "x", "reward": 1.0}]},
        {"groups": [{"completions": [{"completion_id": "x", "reward": 1.0}]}]},
    ):
        with pytest.raises(InvalidRequest, match="through the gateway"):
            prepared(host, **unresolved)

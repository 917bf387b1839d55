"""The engine scores what it is given: the tiny model's log-probabilities of a replay are those of the rollout."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Sequence

import pytest
import torch

from services.common.adapters.names import AdapterVersion
from services.common.errors import DeadlineExceeded, InvalidRequest, ModelNotFound
from services.trainer.host.rollouts import Completion, RolloutRequest, RolloutSampling, ScoreRequest
from tests.parity.test_rollouts import GREEDY, adapter, requests
from tests.rollout_support import TIMEOUT, Pod, running_pod, wait_for

HOT = RolloutSampling(3.0, 24, frozenset(range(5, 400, 15)))
"""Some end early."""
WARM = RolloutSampling(1.3, 24)


def again(
    asked: Sequence[RolloutRequest], found: Sequence[Completion], sampling: RolloutSampling
) -> list[ScoreRequest]:
    return [
        ScoreRequest(one.prompt, completion.token_ids, sampling.temperature)
        for one, completion in zip(asked, found, strict=True)
    ]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sampling", [HOT, WARM, GREEDY], ids=["hot", "warm", "greedy"])
def test_a_replay_says_what_was_said(pod: Pod, sampling: RolloutSampling) -> None:
    """To the bit where the same requests share the steps, more of them than there are seats."""
    lora = adapter(pod, 1)
    asked = requests(pod, 3, each=5)
    with pod.host.rollouts.policy(lora) as policy:
        found = pod.host.rollouts.generate(asked, sampling, policy)
    with pod.host.rollouts.policy(lora) as policy:
        scored = pod.host.rollouts.score(again(asked, found, sampling), policy)
        twice = pod.host.rollouts.score(again(asked, found, sampling), policy)
        alone = [pod.host.rollouts.score([one], policy)[0] for one in again(asked, found, sampling)[::4]]
    assert scored == [one.logprobs for one in found]
    assert twice == scored, "what an earlier call left in the cache shows"
    assert len({len(one.token_ids) for one in found}) > 3 or sampling is not HOT
    for mine, theirs in zip(alone, scored[::4], strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-5, atol=3e-5)
    if sampling.temperature == 0:
        plain = [ScoreRequest(one.prompt, one.completion, 1.0) for one in again(asked, found, sampling)]
        with pod.host.rollouts.policy(lora) as policy:
            assert pod.host.rollouts.score(plain, policy) == scored


def trainers(pod: Pod, request: ScoreRequest, lora: object) -> torch.Tensor:
    tokens = torch.tensor([*request.prompt, *request.completion])
    with torch.no_grad():
        hidden = pod.host.model.forward_train(
            tokens[:-1],
            [len(tokens) - 1],
            lora,
            recompute="none",
            give_way=lambda: None,  # type: ignore[arg-type]
        )
        return pod.host.model.token_logprobs(
            hidden[len(request.prompt) - 1 :], tokens[len(request.prompt) :], request.temperature
        )


@pytest.mark.thorough
def test_any_tokens_are_scored_under_any_policy(pod: Pod) -> None:
    """End tokens in the middle, tokens that nobody would sample, mixed temperatures; in an order of its own."""
    lora = adapter(pod, 1)
    version = AdapterVersion("skill", 3)
    pod.registry.versions[version] = lora.to_files("tiny")
    generator = torch.Generator().manual_seed(0)
    eos = pod.engine.codec.eos_ids[0]
    asked = []
    for number, one in enumerate(requests(pod, 4, each=3)):
        tokens = torch.randint(0, 400, (1 + 5 * number % 37,), generator=generator).tolist()
        tokens[:: 1 + number % 4] = [eos] * len(tokens[:: 1 + number % 4])
        asked.append(ScoreRequest(one.prompt, tuple(tokens), (1.0, 0.7, 2.0)[number % 3]))
    base = pod.host.rollouts.score(asked, None)
    published = pod.host.rollouts.score(asked, version)
    with pod.host.rollouts.policy(lora) as policy:
        private = pod.host.rollouts.score(asked, policy)
    assert private == published
    assert all(mine != theirs for mine, theirs in zip(base, private, strict=True))
    for request, of_base, of_policy in zip(asked, base, private, strict=True):
        # Log-probabilities down to -40, of which float32 keeps some 1e-5.
        for found, params in ((of_base, None), (of_policy, lora)):
            torch.testing.assert_close(torch.tensor(found), trainers(pod, request, params), rtol=1e-5, atol=1e-4)


def test_nothing_to_score(pod: Pod) -> None:
    assert pod.host.rollouts.score([], None) == []


def test_what_cannot_be_scored_is_refused(pod: Pod) -> None:
    prompt = requests(pod, 1)[0].prompt
    score = pod.host.rollouts.score
    with pytest.raises(InvalidRequest, match=r"token id 1000000 is outside the vocabulary"):
        score([ScoreRequest(prompt, (5, 10**6), 1.0)], None)
    with pytest.raises(InvalidRequest, match=r"forced_ids has the token id -1"):
        score([ScoreRequest(prompt, (5, -1), 1.0)], None)
    with pytest.raises(InvalidRequest, match="empty"):
        score([ScoreRequest(prompt, (), 1.0)], None)
    with pytest.raises(InvalidRequest, match="leaves room for 56 of 57 tokens"):
        score([ScoreRequest((5,) * 200, (6,) * 57, 1.0)], None)
    with pytest.raises(InvalidRequest, match="no tokens"):
        score([ScoreRequest((), (6,), 1.0)], None)
    with pytest.raises(ModelNotFound, match="skill@9"):
        score([ScoreRequest(prompt, (6,), 1.0)], AdapterVersion("skill", 9))
    assert [len(one) for one in score([ScoreRequest((5,) * 200, (6,) * 56, 1.0)], None)] == [56]


@pytest.mark.thorough
def test_users_go_first_and_nothing_changes(pod: Pod) -> None:
    """A replay that is preempted again and again says the same, to rounding."""
    asked = [ScoreRequest(one.prompt, (7, 8, 9, 10) * 12, 1.0) for one in requests(pod, 4, each=5)]
    quiet = pod.host.rollouts.score(asked, None)
    user = pod.user()
    prompt = tuple(pod.engine.codec.encode("What is 12 + 30?"))
    alone = user.answer(user.submit(prompt))
    before = pod.engine.loop.status().counts.preemptions
    found: list[list[array[float]]] = []
    thread = threading.Thread(target=lambda: found.append(pod.host.rollouts.score(asked, None)))
    thread.start()
    wait_for(lambda: pod.engine.loop.status().counts.running == 8)
    names = [user.submit(prompt) for _ in range(12)]
    assert [user.answer(name) for name in names] == [alone] * 12
    thread.join(TIMEOUT)
    assert pod.engine.loop.status().counts.preemptions > before
    for mine, theirs in zip(found[0], quiet, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-5, atol=1e-4)


def test_a_call_that_ends_early_leaves_nothing(pod: Pod) -> None:
    class Cancelled(Exception):
        pass

    def interrupt() -> None:
        raise Cancelled

    asked = [ScoreRequest(one.prompt, (7,) * 100, 1.0) for one in requests(pod, 4, each=20)]
    with pytest.raises(Cancelled), pod.host.rollouts.policy(adapter(pod, 1)) as policy:
        pod.host.rollouts.score(asked, policy, interrupt=interrupt)
    pod.settle()
    with pytest.raises(DeadlineExceeded, match=r"of 80 rollouts were done"):
        pod.host.rollouts.score(asked, None, deadline=time.monotonic() + 0.05)


def test_beside_speculation() -> None:
    """Nothing is drafted of given tokens, while the requests beside them are drafted for."""
    with running_pod(speculative="mtp") as pod:
        asked = requests(pod, 3, each=4)
        found = pod.host.rollouts.generate(asked, WARM, None)
        pod.settle()  # a step that was in flight when the last one ended is counted, too
        drafted = pod.engine.loop.status().counts.num_draft_tokens
        assert drafted > 0
        scored = pod.host.rollouts.score(again(asked, found, WARM), None)
        pod.settle()
        assert pod.engine.loop.status().counts.num_draft_tokens == drafted
    for mine, one in zip(scored, found, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(one.logprobs), rtol=1e-5, atol=1e-4)

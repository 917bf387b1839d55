"""The engine as a sampler for the trainer, with the tiny model: who samples, beside whom, and what is left behind."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from services.common.adapters.names import AdapterVersion
from services.common.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    TemperError,
    Unavailable,
)
from services.common.jobs import LoraSettings
from services.engine.models.lora.trainable import LoraParams
from services.engine.requests.adapter import AdapterChoice
from services.engine.requests.sampling_params import SamplingParams
from services.engine.requests.submission import Submission
from services.trainer.host.rollouts import Policy, RolloutRequest, RolloutSampling
from tests.rollout_support import TIMEOUT, Pod, running_pod, wait_for

SAMPLED = RolloutSampling(3.0, 24)
"""Hot: the tiny model is sure of its short answers."""
GREEDY = RolloutSampling(0.0, 12)


def adapter(pod: Pod, seed: int) -> LoraParams:
    """One that changes greedy answers."""
    lora = LoraParams.create(pod.engine.model.config, LoraSettings(rank=4, alpha=16, seed=seed))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, master in lora.named_parameters():
            if name.endswith("lora_B"):
                master.normal_(0.0, 0.3, generator=generator)
    return lora


def requests(pod: Pod, count: int, each: int = 1) -> list[RolloutRequest]:
    prompts = [tuple(pod.engine.codec.encode(f"What date is {n} days after 2024-01-1{n}?")) for n in range(count)]
    return [RolloutRequest(prompt, 1000 * n + member) for n, prompt in enumerate(prompts) for member in range(each)]


def test_rollouts_are_what_the_policy_says(pod: Pod) -> None:
    """Tokens of a seed, whoever shares the steps, and log-probabilities of the trainer's own forward pass."""
    lora = adapter(pod, 1)
    asked = requests(pod, 3, each=4)
    with pod.host.rollouts.policy(lora) as policy:
        together = pod.host.rollouts.generate(asked, SAMPLED, policy)
        alone = [pod.host.rollouts.generate([one], SAMPLED, policy)[0] for one in asked[:3]]
    assert [one.token_ids for one in alone] == [one.token_ids for one in together[:3]]
    assert len({one.token_ids for one in together}) > 6
    for request, found in zip(asked, together, strict=True):
        assert len(found.token_ids) == len(found.logprobs) <= 24
        ended = found.token_ids[-1] in pod.engine.codec.eos_ids
        assert found.truncated == (not ended)
        tokens = torch.tensor([*request.prompt, *found.token_ids])
        with torch.no_grad():
            hidden = pod.host.model.forward_train(
                tokens[:-1], [len(tokens) - 1], lora, recompute="none", give_way=lambda: None
            )
            rows = hidden[len(request.prompt) - 1 :]
            expected = pod.host.model.token_logprobs(rows, tokens[len(request.prompt) :], SAMPLED.temperature)
        torch.testing.assert_close(torch.tensor(found.logprobs), expected, rtol=0, atol=1e-4)


def test_the_same_call_gives_the_same_bits(pod: Pod) -> None:
    asked = requests(pod, 3, each=5)
    found = []
    for _ in range(2):
        with pod.host.rollouts.policy(adapter(pod, 1)) as policy:
            found.append(pod.host.rollouts.generate(asked, SAMPLED, policy))
    assert found[0] == found[1]


def test_base_published_and_private_policies(pod: Pod) -> None:
    version = AdapterVersion("skill", 1)
    pod.registry.versions[version] = adapter(pod, 1).to_files("tiny")
    asked = requests(pod, 2)
    base = pod.host.rollouts.generate(asked, GREEDY, None)
    published = pod.host.rollouts.generate(asked, GREEDY, version)
    with pod.host.rollouts.policy(adapter(pod, 1)) as policy:
        private = pod.host.rollouts.generate(asked, GREEDY, policy)
    with pod.host.rollouts.policy(adapter(pod, 2)) as policy:
        other = pod.host.rollouts.generate(asked, GREEDY, policy)
    assert private == published
    assert base != published
    assert other != private
    with pytest.raises(ModelNotFound, match="skill@7"):
        pod.host.rollouts.generate(asked, GREEDY, AdapterVersion("skill", 7))


def test_a_policy_that_left_samples_nothing(pod: Pod) -> None:
    with pod.host.rollouts.policy(adapter(pod, 1)) as policy:
        assert pod.slots_taken() == 1
        assert not pod.engine.adapters.snapshot().loaded or all(
            "private" not in loaded.pin.version for loaded in pod.engine.adapters.snapshot().loaded
        )
    with pytest.raises(ModelNotFound, match="removed from its slot"):
        pod.host.rollouts.generate(requests(pod, 1), GREEDY, policy)


def test_no_cache_entry_outlives_its_policy(pod: Pod) -> None:
    """The same prompt, longer than several blocks, under two policies in the same slot."""
    prompt = tuple(pod.engine.codec.encode("What date is 5 days after 2024-01-10? " * 6))
    answers: list[Policy] = []
    found = []
    for seed in (1, 2, 1):
        with pod.host.rollouts.policy(adapter(pod, seed)) as policy:
            answers.append(policy)
            twice = [pod.host.rollouts.generate([RolloutRequest(prompt, 0)], GREEDY, policy)[0] for _ in range(2)]
        assert twice[0].token_ids == twice[1].token_ids
        found.append(twice[0].token_ids)
    assert found[0] == found[2] != found[1]
    assert len(set(answers)) == 3


def test_what_does_not_fit_is_refused(pod: Pod) -> None:
    with pytest.raises(InvalidRequest, match="leaves room for 56 of 100 tokens"):
        pod.host.rollouts.check(200, 100)
    with pytest.raises(InvalidRequest, match="context"):
        pod.host.rollouts.check(300, 1)
    pod.host.rollouts.check(200, 56)
    with pytest.raises(InvalidRequest, match="shorten the prompt"):
        pod.host.rollouts.generate([*requests(pod, 2), RolloutRequest((5,) * 300, 0)], GREEDY, None)


@pytest.mark.thorough
def test_users_go_first_and_get_what_they_get_alone(pod: Pod) -> None:
    """Five times as many rollouts as seats; a user's request takes a seat at once and answers the same."""
    user = pod.user()
    prompt = tuple(pod.engine.codec.encode("What is 12 + 30?"))
    alone = user.answer(user.submit(prompt))
    done: list[float] = []

    def roll() -> None:
        asked = requests(pod, 4, each=10)
        with pod.host.rollouts.policy(adapter(pod, 1)) as policy:
            pod.host.rollouts.generate(asked, RolloutSampling(20.0, 40), policy)
        done.append(time.monotonic())

    thread = threading.Thread(target=roll)
    thread.start()
    wait_for(lambda: pod.engine.loop.status().counts.running == 8)
    names = [user.submit(prompt, adapter=AdapterChoice()) for _ in range(12)]
    assert [user.answer(name) for name in names] == [alone] * 12
    thread.join(TIMEOUT)
    assert done
    assert all(user.ended_at[name] < done[0] for name in names)
    assert pod.engine.loop.status().counts.preemptions > 0


@pytest.mark.parametrize("seats", [1, 3])
def test_no_more_rollouts_than_allowed_are_in_the_engine(seats: int) -> None:
    with running_pod(sequences=seats) as pod:
        most = 0

        def look() -> None:
            nonlocal most
            most = max(most, pod.engine.loop.status().background)

        found = pod.host.rollouts.generate(requests(pod, 2, each=4), SAMPLED, None, interrupt=look)
        pod.settle()
    assert len(found) == 8
    assert most <= seats


def test_an_interrupted_call_leaves_nothing(pod: Pod) -> None:
    class Cancelled(Exception):
        pass

    looks = 0

    def interrupt() -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            raise Cancelled

    asked = requests(pod, 4, each=20)
    with pytest.raises(Cancelled), pod.host.rollouts.policy(adapter(pod, 1)) as policy:
        pod.host.rollouts.generate(asked, RolloutSampling(20.0, 100), policy, interrupt=interrupt)
    pod.settle()
    assert looks == 2


def test_a_deadline_ends_the_wait(pod: Pod) -> None:
    with pytest.raises(DeadlineExceeded, match=r"of 80 rollouts were done.*TEMPER_ROLLOUT_TIMEOUT_SECONDS"):
        pod.host.rollouts.generate(
            requests(pod, 4, each=20), RolloutSampling(20.0, 100), None, deadline=time.monotonic() + 0.1
        )


@pytest.mark.thorough
def test_without_a_free_slot_the_job_is_told(pod: Pod) -> None:
    for name in ("one", "two", "three"):
        pod.registry.versions[AdapterVersion(name, 1)] = adapter(pod, 3).to_files("tiny")
    user = pod.user()
    prompt = tuple(pod.engine.codec.encode("Tell me something long."))
    names = [
        user.submit(prompt, adapter=AdapterChoice(name=name), max_tokens=220, ignore_eos=True)
        for name in ("one", "two", "three")
    ]
    wait_for(lambda: all(user.tokens[name] for name in names))
    frozen = threading.Event()
    release = threading.Event()

    def hold() -> None:
        frozen.set()
        release.wait(TIMEOUT)

    pod.engine.loop.call_at_boundary(hold)  # the answers must not end before the patience with them does
    assert frozen.wait(TIMEOUT)
    try:
        with (
            pytest.raises(Overloaded, match=r"no adapter slot for its policy in 2 s.*TEMPER_ADAPTER_SLOTS"),
            pod.host.rollouts.policy(adapter(pod, 1)),
        ):
            raise AssertionError("there is no slot")
    finally:
        release.set()
    for name in names:
        user.answer(name)
    with pod.host.rollouts.policy(adapter(pod, 1)) as policy:
        assert pod.host.rollouts.generate(requests(pod, 1), GREEDY, policy)


@pytest.mark.parametrize("end", ["drain", "stop"])
def test_an_engine_that_ends_says_so(end: str) -> None:
    with running_pod() as pod:
        failed: list[TemperError] = []

        def roll() -> None:
            try:
                with pod.host.rollouts.policy(adapter(pod, 1)) as policy:
                    pod.host.rollouts.generate(requests(pod, 4, each=20), RolloutSampling(20.0, 100), policy)
            except TemperError as error:
                failed.append(error)

        thread = threading.Thread(target=roll)
        thread.start()
        wait_for(lambda: pod.engine.loop.status().counts.running == 8)
        if end == "drain":
            pod.engine.loop.drain(0.0)
        else:
            pod.engine.loop.stop()
        thread.join(TIMEOUT)
        assert isinstance(failed[0], Unavailable)
        assert pod.slots_taken() == 0 or wait_for(lambda: pod.slots_taken() == 0) is None


@pytest.mark.thorough
def test_gentle_requests_are_few_beside_users_and_many_without(pod: Pod) -> None:
    loop = pod.engine.loop
    asked = requests(pod, 12)
    alone = pod.host.rollouts.generate(asked, GREEDY, None, gentle=True)
    ended, seen = threading.Event(), []
    prompt = tuple(pod.engine.codec.encode("Tell me a story."))
    user = Submission("user", prompt, SamplingParams(max_tokens=200, ignore_eos=True), AdapterChoice())
    loop.submit(user, lambda updates: ended.set() if updates[-1].finish_reason is not None else None)
    wait_for(lambda: loop.status().counts.running == 1)

    def watch() -> None:
        while not ended.wait(0.002):
            seen.append(loop.status().background)

    watching = threading.Thread(target=watch)
    watching.start()
    beside = pod.host.rollouts.generate(asked, GREEDY, None, gentle=True)
    assert ended.wait(TIMEOUT)
    watching.join()
    assert [one.token_ids for one in beside] == [one.token_ids for one in alone]
    assert max(seen) == 1, "one beside a single user"

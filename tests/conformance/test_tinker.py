"""Tinker's own SDK against a whole Temper, as its users write it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import tinker
import torch
from tinker import types

from tests.stack import PATIENCE, Stack

TOKENS = [40 + 7 * place % 60 for place in range(32)]


@pytest.fixture
def service(stack: Stack) -> Iterator[tinker.ServiceClient]:
    client = tinker.ServiceClient(base_url=stack.url, api_key="tml-none", user_metadata={"who": "tests"})
    yield client
    client.close("success").result(PATIENCE)


@pytest.fixture
def rest(stack: Stack) -> tinker.RestClient:
    return tinker.RestClient(base_url=stack.url, api_key="tml-none")


def trainer(service: tinker.ServiceClient, stack: Stack, **settings: Any) -> tinker.TrainingClient:
    asked = {"rank": 8, "seed": 3, **settings}
    return service.create_lora_training_client(stack.served_model_name, **asked).result(PATIENCE)


def datum(tokens: list[int], **inputs: Any) -> types.Datum:
    sent: dict[str, Any] = {"target_tokens": tokens[1:], **inputs}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=sent)


def logprobs_of(output: types.ForwardBackwardOutput) -> list[torch.Tensor]:
    return [one["logprobs"].to_torch() for one in output.loss_fn_outputs]


def norm_of(step: Any) -> float:
    """Norm of the gradient that a step applied."""
    return float(step.result(PATIENCE).metrics["grad_norm:mean"])


def adam(rate: float = 1e-3) -> types.AdamParams:
    return types.AdamParams(learning_rate=rate, beta2=0.95, eps=1e-12, weight_decay=0.01, grad_clip_norm=1.0)


def test_a_loop_has_the_losses_of_a_session_of_temper(service: tinker.ServiceClient, stack: Stack) -> None:
    """20 steps; benchmarks.training.tinker_losses has 100."""
    training = trainer(service, stack)
    weights = [0.0] * 8 + [0.5] * 23
    with httpx.Client(base_url=stack.url, timeout=PATIENCE) as http:
        session = http.post("/v1/train/sessions", json={"lora": {"rank": 8, "seed": 3}}).json()["id"]

        def direct(call: str, **body: Any) -> dict[str, Any]:
            future = http.post(f"/v1/train/sessions/{session}/{call}", json=body).json()["id"]
            return dict(http.get(f"/v1/train/futures/{future}", params={"wait": 60}).json()["result"])

        try:
            for step in range(20):
                rolled = TOKENS[step:] + TOKENS[:step]
                forward = training.forward_backward(
                    [datum(rolled, weights=weights), datum(TOKENS[:9])], "cross_entropy"
                )
                ended = training.optim_step(adam())
                data = [{"token_ids": rolled, "weights": [0.0, *weights]}, {"token_ids": TOKENS[:9]}]
                expected = direct("forward_backward", seq=2 * step + 1, loss="cross_entropy", data=data)
                found = forward.result(PATIENCE)
                assert found.metrics["loss:sum"] == pytest.approx(expected["loss"], rel=1e-6)
                taken = direct(
                    "optim_step",
                    seq=2 * step + 2,
                    learning_rate=1e-3,
                    beta2=0.95,
                    eps=1e-12,
                    weight_decay=0.01,
                    max_grad_norm=1.0,
                )
                assert norm_of(ended) == pytest.approx(taken["grad_norm"], rel=1e-5)
        finally:
            http.delete(f"/v1/train/sessions/{session}")
    every = found.loss_fn_outputs[0]["logprobs"]
    assert every.shape == [31], "of all tokens, also those of weight 0"


def sampled(kind: str, logp: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Losses of Tinker's documentation, with its defaults."""
    ratio = (logp - behaviour).exp()
    match kind:
        case "importance_sampling":
            return -(ratio * advantages).sum()
        case "ppo":
            return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()
        case "cispo":
            return -(ratio.clamp(0.0, 4.0) * advantages * logp).sum()
    return -(logp * advantages - 0.05 * (logp - behaviour) ** 2).sum()


def test_losses_are_those_of_tinkers_documentation(service: tinker.ServiceClient, stack: Stack) -> None:
    training = trainer(service, stack, train_mlp=False)
    before = training.forward([datum(TOKENS)], "cross_entropy").result(PATIENCE)
    (logp,) = logprobs_of(before)
    assert before.metrics["loss:sum"] == pytest.approx(float(-logp.sum()), rel=1e-5)
    behaviour = logp + torch.linspace(-2.0, 0.5, 31).clamp(max=-logp)
    advantages = torch.tensor([0.0, 1.0, -1.0] * 10 + [2.0])
    for kind in ("importance_sampling", "ppo", "cispo", "dro"):
        one = datum(TOKENS, logprobs=behaviour, advantages=advantages)
        found = training.forward_backward([one], kind).result(PATIENCE)
        assert found.metrics["loss:sum"] == pytest.approx(float(sampled(kind, logp, behaviour, advantages)), rel=1e-4)
        assert torch.equal(logprobs_of(found)[0], logp)
    narrow = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.0}
    one = datum(TOKENS, logprobs=behaviour, advantages=advantages.abs())
    ratio = (logp - behaviour).exp()
    clipped = -(torch.minimum(ratio, ratio.clamp(0.9, 1.0)) * advantages.abs()).sum()
    found = training.forward([one], "ppo", narrow).result(PATIENCE)
    assert found.metrics["loss:sum"] == pytest.approx(float(clipped), rel=1e-4)
    # Two targets a position, dense and sparse.
    targets = torch.tensor([[token, 0] for token in TOKENS[1:]])
    targets[4, 1], weights = 77, torch.zeros(31, 2)
    weights[:, 0], weights[4, 1] = 0.5, 2.0
    sparse = types.TensorData.from_torch_sparse(weights)
    inputs = {"target_tokens": types.TensorData.from_torch(targets), "weights": sparse}
    several = types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=inputs)
    found = training.forward([datum(TOKENS), several], "cross_entropy").result(PATIENCE)
    plain, matrix = logprobs_of(found)
    assert (list(plain.shape), list(matrix.shape)) == ([31], [31, 2])
    assert torch.equal(matrix[:, 0], plain)
    expected = -plain.sum() - 0.5 * plain.sum() - 2.0 * matrix[4, 1]
    assert found.metrics["loss:sum"] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.thorough
def test_a_custom_loss_has_the_gradient_of_the_one_it_says(service: tinker.ServiceClient, stack: Stack) -> None:
    built_in, custom = (trainer(service, stack, seed=4) for _ in range(2))
    data = [datum(TOKENS), datum(TOKENS[5:20])]

    def negative(_: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -sum((one.sum() for one in logprobs), torch.zeros(())), {"mine": 1.0}

    def traced(logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -logprobs.sum(), {"custom/tokens:sum": logprobs.detach().sum() * 0 + 1}

    handle = service.create_custom_loss(traced, {"logprobs": 1}).result(PATIENCE)
    for loss, metric in ((negative, "mine"), (handle, "custom/tokens:sum")):
        first = built_in.forward_backward(data, "cross_entropy")
        second = custom.forward_backward_custom(data, loss)
        steps = [built_in.optim_step(adam()), custom.optim_step(adam())]
        norms = [norm_of(step) for step in steps]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        said = second.result(PATIENCE).metrics
        assert said[metric] in (1.0, 2.0)
        assert said["loss:sum"] == pytest.approx(first.result(PATIENCE).metrics["loss:sum"], rel=1e-5)


def test_saved_states_go_on_and_samplers_are_versions(
    service: tinker.ServiceClient, rest: tinker.RestClient, stack: Stack
) -> None:
    training = trainer(service, stack, user_metadata={"adapter": "tinker-named", "note": "x"})

    def step(client: tinker.TrainingClient) -> float:
        forward = client.forward_backward([datum(TOKENS)], "cross_entropy")
        client.optim_step(adam(3e-3)).result(PATIENCE)
        return float(forward.result(PATIENCE).metrics["loss:sum"])

    for _ in range(3):
        step(training)
    saved = training.save_state("three", ttl_seconds=7200, user_metadata={"kind": "good"}).result(PATIENCE)
    assert saved.path == f"tinker://{training.model_id}/weights/three"
    later = [step(training) for _ in range(3)]
    whole = service.create_training_client_from_state_with_optimizer(saved.path).result(PATIENCE)
    assert [step(whole) for _ in range(3)] == pytest.approx(later, rel=1e-6)
    fresh = service.create_training_client_from_state(saved.path).result(PATIENCE)
    again = [step(fresh) for _ in range(3)]
    assert again[0] == pytest.approx(later[0], rel=1e-6)
    assert again[2] != pytest.approx(later[2], rel=1e-6), "the moments began anew"
    with pytest.warns(FutureWarning):
        training.load_state(saved.path).result(PATIENCE)
    with pytest.warns(FutureWarning):
        training.load_state_with_optimizer(saved.path).result(PATIENCE)
    assert [step(training) for _ in range(2)] == pytest.approx(later[:2], rel=1e-6)

    kept = training.save_weights_for_sampler("served").result(PATIENCE)
    version = httpx.get(f"{stack.url}/v1/adapters/tinker-named/versions", timeout=PATIENCE).json()["data"][-1]
    assert (version["version"], version["metrics"]["session_steps"]) == (1, 5)
    sampler = service.create_sampling_client(kept.path).result(PATIENCE)
    ephemeral = training.save_weights_and_get_sampling_client().result(PATIENCE)
    base = service.create_sampling_client(base_model=stack.served_model_name).result(PATIENCE)
    prompt, greedy = types.ModelInput.from_ints(TOKENS[:6]), types.SamplingParams(max_tokens=8, temperature=0.0)
    handed = tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle(), api_key="tml-none")
    clients = (sampler, ephemeral, handed, base)
    answers = [one.sample(prompt, 1, greedy).result(PATIENCE).sequences[0].tokens for one in clients]
    assert answers[0] == answers[1] == answers[2] != answers[3]
    said = {
        "model": "tinker-named@1",
        "prompt": TOKENS[:6],
        "max_tokens": 8,
        "temperature": 0,
        "return_token_ids": True,
    }
    ours = httpx.post(f"{stack.url}/v1/completions", json=said, timeout=PATIENCE).json()["choices"][0]
    assert ours["token_ids"] == answers[0]
    # A sampler scores as the trainer does.
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result(PATIENCE)
    (trained,) = logprobs_of(training.forward([datum(TOKENS)], "cross_entropy").result(PATIENCE))
    assert scored[0] is None
    assert scored[1:] == pytest.approx(trained.tolist(), abs=1e-3)
    several = types.SamplingParams(max_tokens=6, seed=5, stop=[TOKENS[0]])
    drawn = ephemeral.sample(prompt, 3, several, topk_sample_logprobs=2, topk_prompt_logprobs=3).result(PATIENCE)
    assert len({one.sequence_id for one in drawn.sequences}) == 3
    for one in drawn.sequences:
        assert (one.stop_reason == "stop") == (len(one.tokens) < 6 or one.tokens[-1] == TOKENS[0])
        assert len(one.tokens) == len(one.logprobs or ()) == len(one.topk_logprobs or ())
        for token, logprob, tops in zip(one.tokens, one.logprobs or (), one.topk_logprobs or (), strict=True):
            assert tops is not None
            assert dict(tops).get(token, logprob) == pytest.approx(logprob, abs=1e-4)
    assert [one and len(one) for one in drawn.topk_prompt_logprobs or ()] == [None, *[3] * 5]

    run = rest.get_training_run(training.model_id).result(PATIENCE)
    assert (run.lora_rank, run.user_metadata) == (8, {"adapter": "tinker-named", "note": "x"})
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.tinker_path == saved.path
    listed = rest.list_checkpoints(training.model_id).result(PATIENCE).checkpoints
    assert [(one.checkpoint_id, one.checkpoint_type) for one in listed] == [
        ("weights/three", "training"),
        ("sampler_weights/served", "sampler"),
    ]
    assert listed[0].expires_at is not None
    assert listed[0].user_metadata == {"kind": "good"}
    runs = rest.list_training_runs().result(PATIENCE).training_runs
    assert training.model_id in [one.training_run_id for one in runs]
    session = training.model_id.partition(":")[0]
    assert rest.get_session(session).result(PATIENCE).training_run_ids[0] == training.model_id
    assert session in rest.list_sessions().result(PATIENCE).sessions
    paths = [one.tinker_path for one in rest.list_user_checkpoints().result(PATIENCE).checkpoints]
    assert {saved.path, kept.path} <= set(paths)
    assert rest.get_training_run_by_tinker_path(kept.path).result(PATIENCE).training_run_id == training.model_id
    known = rest.get_sampler(sampler._sampling_session_id).result(PATIENCE)
    assert (known.base_model, known.model_path) == (stack.served_model_name, "tinker://tinker-named/sampler_weights/1")
    assert rest.get_weights_info_by_tinker_path(saved.path).result(PATIENCE).lora_rank == 8
    rest.set_checkpoint_ttl_from_tinker_path(saved.path, None).result(PATIENCE)
    assert rest.list_checkpoints(training.model_id).result(PATIENCE).checkpoints[0].expires_at is None
    rest.delete_checkpoint_from_tinker_path(saved.path).result(PATIENCE)
    with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
        service.create_training_client_from_state(saved.path).result(PATIENCE)


REFUSALS: dict[str, Callable[[tinker.TrainingClient], Any]] = {
    "gspo": lambda client: client.forward_backward([datum(TOKENS)], "gspo"),
    "needs data[0].loss_fn_inputs.advantages": lambda client: client.forward_backward([datum(TOKENS)], "ppo"),
    "has the shape [3]": lambda client: client.forward_backward([datum(TOKENS, weights=[1.0] * 3)], "cross_entropy"),
    "the vocabulary ends at": lambda client: client.forward([datum([5, 10**6])], "cross_entropy"),
    "has no setting 'beta'": lambda client: client.forward([datum(TOKENS)], "cross_entropy", {"beta": 0.1}),
    "less than or equal to 1": lambda client: client.optim_step(types.AdamParams(learning_rate=2.0)),
    "AdamW is the only optimizer": lambda client: client.optim_step(types.DimuonParams(learning_rate=0.1)),
    "may have 36": lambda client: client.save_state("x" * 40),
    "greater than or equal to 3600": lambda client: client.save_state("short", ttl_seconds=60),
    "save_weights_external is not supported": lambda client: client.save_weights_external("files"),
}


def test_a_refused_request_fails_alone(service: tinker.ServiceClient, stack: Stack) -> None:
    training = trainer(service, stack)
    reference = training.forward_backward([datum(TOKENS)], "cross_entropy")
    expected = training.optim_step(adam(0.0))
    for reason, ask in REFUSALS.items():
        with pytest.raises(tinker.RequestFailedError) as failed:
            ask(training).result(PATIENCE)
        assert reason in str(failed.value)
        assert failed.value.category is types.RequestErrorCategory.User
    norm = norm_of(expected)
    loss = reference.result(PATIENCE).metrics["loss:sum"]
    # Half of a step's gradient is never applied.
    training.forward_backward([datum(TOKENS[:9])], "cross_entropy")
    bad = training.forward_backward([datum(TOKENS)], "gspo")
    lost = training.optim_step(adam())
    for future in (bad, lost):
        with pytest.raises(tinker.RequestFailedError):
            future.result(PATIENCE)
    after = training.forward_backward([datum(TOKENS)], "cross_entropy")
    assert norm_of(training.optim_step(adam(0.0))) == pytest.approx(norm, rel=1e-6)
    assert after.result(PATIENCE).metrics["loss:sum"] == pytest.approx(loss, rel=1e-6)


def test_what_cannot_be_is_said_at_once(service: tinker.ServiceClient, rest: tinker.RestClient, stack: Stack) -> None:
    with pytest.raises(tinker.BadRequestError, match="base_model 'Qwen/Qwen3-8B' is not served here"):
        service.create_lora_training_client("Qwen/Qwen3-8B").result(PATIENCE)
    with pytest.raises(tinker.BadRequestError, match="rank is 200, and engines serve adapters up to rank"):
        service.create_lora_training_client(stack.served_model_name, rank=200).result(PATIENCE)
    with pytest.raises(tinker.NotFoundError):
        service.create_sampling_client("tinker://nobody/sampler_weights/1").result(PATIENCE)
    sampler = service.create_sampling_client(base_model=stack.served_model_name).result(PATIENCE)
    prompt = types.ModelInput.from_ints(TOKENS)
    for params, reason in (
        (types.SamplingParams(max_tokens=4, temperature=9.0), "temperature"),
        (types.SamplingParams(max_tokens=10**7), "context"),
    ):
        with pytest.raises((tinker.BadRequestError, tinker.RequestFailedError), match=reason):
            sampler.sample(prompt, 1, params).result(PATIENCE)
    with pytest.raises(tinker.BadRequestError, match="prompt_alt_tokens_k"):
        sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1), prompt_alt_tokens_k=2).result(PATIENCE)
    path = "tinker://tinker-0000000000000000:train:0/weights/x"
    with pytest.raises(tinker.BadRequestError, match="publish_checkpoint is not supported"):
        rest.publish_checkpoint_from_tinker_path(path).result(PATIENCE)


@pytest.mark.thorough
def test_supervised_learning(service: tinker.ServiceClient, stack: Stack) -> None:
    """The loop of the cookbook's sl_loop: batches of conversations, a linear schedule, losses a token."""
    training = trainer(service, stack, rank=16)
    chance = random.Random(0)
    rows = [[*TOKENS[:4], 90 + place, 91 + place, 92 + place] for place in range(8)]
    losses = []
    for step in range(12):
        batch = chance.sample(rows, 4)
        data = [datum(row, weights=[0.0] * 3 + [1.0] * 3) for row in batch]
        forward = training.forward_backward(data, "cross_entropy")
        optim = training.optim_step(types.AdamParams(learning_rate=8e-3 * (1 - step / 12)))
        told = forward.result(PATIENCE)
        optim.result(PATIENCE)
        losses.append(sum(-float(one[3:].sum()) for one in logprobs_of(told)) / 12)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.thorough
def test_reinforcement_learning(service: tinker.ServiceClient, stack: Stack) -> None:
    """The loop of the cookbook's rl_loop: groups of samples, advantages within a group, a new sampler each step."""
    training = trainer(service, stack, rank=16)
    asked = [40, 41, 42]
    prompt = types.ModelInput.from_ints(asked)
    rewards = []
    for step in range(6):
        sampler = training.save_weights_and_get_sampling_client().result(PATIENCE)
        params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=100 * step)
        group = sampler.sample(prompt, 16, params).result(PATIENCE).sequences
        scores = [sum(token < 60 for token in one.tokens) / len(one.tokens) for one in group]
        mean = sum(scores) / len(scores)
        rewards.append(mean)
        data = []
        for one, score in zip(group, scores, strict=True):
            behaviour = [0.0, 0.0, *(one.logprobs or ())]
            advantages = [0.0, 0.0, *[score - mean] * len(one.tokens)]
            data.append(datum([*asked, *one.tokens], logprobs=behaviour, advantages=advantages))
        forward = training.forward_backward(data, "importance_sampling")
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result(PATIENCE)
        told = forward.result(PATIENCE)
        assert math.isfinite(told.metrics["loss:sum"])
        if step == 0:
            for one, logprobs in zip(group, logprobs_of(told), strict=True):
                assert logprobs[2:].tolist() == pytest.approx(one.logprobs, abs=1e-3), "sampled and trained on alike"
    assert rewards[-1] > rewards[0] + 0.2, rewards

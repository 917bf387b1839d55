"""One device, two threads: the loop serves and a trainer learns on the same weights, and neither notices the other in
its numbers."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import pytest
import torch
from torch import Tensor

from services.common.errors import TemperError
from services.common.jobs import LoraSettings
from services.engine.compute_sharing.host_lock import SliceGate
from services.engine.executors.cpu.runner import ModelRunner
from services.engine.loop.loop import EngineLoop
from services.engine.loop.rollout_buffer import RolloutBuffer
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.requests.adapter import BASE_PIN, AdapterChoice, AdapterPin
from services.engine.requests.outputs import SequenceUpdate
from services.engine.requests.sampling_params import SamplingParams
from services.engine.requests.submission import Submission
from services.engine.scheduler.config import SchedulerConfig
from tests.parity.conftest import Pair
from tests.parity.fused_models import in_float64
from tests.parity.reference import CONFIGS

TIMEOUT = 120.0
MAX_TOKENS = 30


class NoAdapters:
    def pin(self, choice: AdapterChoice) -> AdapterPin:
        return BASE_PIN

    def release(self, pin: AdapterPin) -> None:
        pass

    def give_up(self, choice: AdapterChoice) -> None:
        pass

    def overdue(self, choice: AdapterChoice) -> TemperError:
        return TemperError(f"{choice} was waited for, although the base always serves")


def gradients(model: Qwen3_5, gate: SliceGate, steps: int) -> list[Tensor]:
    """The summed gradients of a fresh adapter over some identical steps, in the model's dtype."""
    lora = LoraParams.create(model.config, LoraSettings(rank=4), device=model.device)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.config.vocab_size, (90,), generator=generator)
    with torch.no_grad():
        for parameter in lora.parameters():
            values = torch.randn(parameter.shape, generator=generator) * 0.1
            if model.dtype == torch.float64:  # masters are of float32
                parameter.data = values.to(model.device, model.dtype)
            else:  # in place: on a GPU products read them where they all lie
                parameter.copy_(values)
    tokens = tokens.to(model.device)
    for _ in range(steps):
        with gate.training():
            hidden = model.forward_train(tokens, [40, 50], lora, recompute="full", give_way=gate.give_way)
            model.token_logprobs(hidden[:-1], tokens[1:]).sum().backward()
    return [parameter.grad for parameter in lora.parameters() if parameter.grad is not None]


def exact_gradients(pair: Pair) -> list[Tensor]:
    """What gradients() of one step are without rounding: the same code, all of it in float64."""
    model = Qwen3_5.from_directory(pair.path, dtype=torch.float64, device="cpu")
    with in_float64():
        exact = gradients(model, SliceGate(0.02), 1)
    assert all(gradient.dtype == torch.float64 for gradient in exact)
    return exact


def relative(ours: Tensor, reference: Tensor) -> float:
    """The norm of the difference over that of the reference."""
    ours, reference = ours.detach().double().cpu(), reference.detach().double().cpu()
    return float((ours - reference).norm() / reference.norm().clamp_min(1e-12))


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_those_of_float64(pairs: dict[str, Pair], name: str) -> None:
    exact = exact_gradients(pairs[name])
    ours = gradients(pairs[name].model, SliceGate(0.02), 1)
    assert len(ours) == len(exact)
    for one, other in zip(ours, exact, strict=True):
        assert relative(one, other) < 1e-4


def test_answers_and_gradients_are_those_of_each_alone(pairs: dict[str, Pair]) -> None:
    reference, model = pairs["grouped"].reference, pairs["grouped"].model
    config = SchedulerConfig(
        max_num_seqs=4, token_budget=64, block_size=16, num_blocks=100, num_slots=12, max_model_len=256
    )
    cache = model.allocate_cache(config.num_blocks, config.block_size, config.num_slots)
    lora = LoraSlots(model.config, 1, 4, torch.float32, torch.device("cpu"))
    gate = SliceGate(0.02)
    loop = EngineLoop(
        config,
        ModelRunner(model, cache, lora, num_slots=config.num_slots, eos_token_ids=[]),
        NoAdapters(),
        gate,
        RolloutBuffer(0, 1.0),
    )
    steps = 6
    alone = gradients(model, SliceGate(0.02), steps)

    learned: SimpleQueue[list[Tensor] | BaseException] = SimpleQueue()

    def learn() -> None:
        try:
            learned.put(gradients(model, gate, steps))
        except BaseException as error:
            learned.put(error)

    frames: SimpleQueue[list[SequenceUpdate]] = SimpleQueue()
    generator = torch.Generator().manual_seed(1)
    prompts = {f"r{n}": tuple(torch.randint(0, 211, (5 + 7 * n,), generator=generator).tolist()) for n in range(8)}
    outputs: dict[str, list[int]] = {name: [] for name in prompts}
    loop.start()
    trainer = threading.Thread(target=learn)
    trainer.start()
    try:
        sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
        for name, prompt in prompts.items():
            loop.submit(Submission(name, prompt, sampling, AdapterChoice()), frames.put)
        running = set(prompts)
        while running:
            for update in frames.get(timeout=TIMEOUT):
                assert update.error is None
                if update.token is not None:
                    outputs[update.request_id].append(update.token.token_id)
                if update.finish_reason is not None:
                    running.discard(update.request_id)
        result = learned.get(timeout=TIMEOUT)
    finally:
        loop.stop()
        trainer.join(TIMEOUT)

    assert not isinstance(result, BaseException), result
    for together, separate in zip(result, alone, strict=True):
        torch.testing.assert_close(together, separate, rtol=1e-5, atol=1e-6)
    for name, prompt in prompts.items():
        with torch.no_grad():
            expected = reference.generate(torch.tensor([prompt]), max_new_tokens=MAX_TOKENS, do_sample=False)
        assert outputs[name] == expected[0, len(prompt) :].tolist()

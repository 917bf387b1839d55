"""AdamW against its formulas, the schedule, clipping, and a resume that is equal bit by bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from services.common.errors import InvalidRequest
from services.common.jobs import OptimizerSettings
from services.trainer.optimizer import MasterOptimizer, ScheduledOptimizer, States, learning_rate
from services.trainer.optimizer.adamw_8bit import STATE_BYTES, decode, encode, levels


def parameters(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in ((3, 4), (5,))]


def set_gradients(tensors: list[Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for tensor in tensors:
        tensor.grad = torch.randn(tensor.shape, generator=generator)


def test_adamw_with_clipping_equals_the_formula() -> None:
    settings = OptimizerSettings(weight_decay=0.1, max_grad_norm=0.5, beta1=0.8, beta2=0.9)
    tensors = parameters()
    optimizer = ScheduledOptimizer(tensors, settings, peak=0.01, total_steps=5)
    expected = [tensor.detach().double() for tensor in parameters()]
    first = [torch.zeros_like(tensor) for tensor in expected]
    second = [torch.zeros_like(tensor) for tensor in expected]
    for step in range(5):
        set_gradients(tensors, step)
        gradients = [tensor.grad.double() for tensor in tensors if tensor.grad is not None]
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
        metrics = optimizer.step(step)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
        for index, gradient in enumerate(gradients):
            clipped = gradient * min(1.0, 0.5 / (norm + 1e-6))
            first[index] = 0.8 * first[index] + 0.2 * clipped
            second[index] = 0.9 * second[index] + 0.1 * clipped.square()
            update = first[index] / (1 - 0.8 ** (step + 1))
            update = update / ((second[index] / (1 - 0.9 ** (step + 1))).sqrt() + 1e-8)
            expected[index] = expected[index] * (1 - 0.01 * 0.1) - 0.01 * update
    for tensor, wanted in zip(tensors, expected, strict=True):
        torch.testing.assert_close(tensor.detach().double(), wanted, rtol=1e-5, atol=1e-6)


def test_schedules() -> None:
    constant = OptimizerSettings(warmup_steps=4)
    assert [learning_rate(constant, 1.0, step, 10) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    cosine = OptimizerSettings(schedule="cosine", warmup_steps=2)
    rates = [learning_rate(cosine, 1.0, step, 10) for step in range(10)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[6] == pytest.approx(0.5)
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] > 0
    linear = OptimizerSettings(schedule="linear", warmup_steps=2)
    assert [learning_rate(linear, 1.0, step, 6) for step in range(6)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert all(rate > 0 for rate in (learning_rate(OptimizerSettings(warmup_steps=99), 1.0, s, 3) for s in range(3)))


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_resume_is_bitwise(stop: int) -> None:
    settings = OptimizerSettings(schedule="cosine")

    def run(tensors: list[Tensor], optimizer: ScheduledOptimizer, steps: range) -> None:
        for step in steps:
            set_gradients(tensors, step)
            optimizer.step(step)

    straight = parameters()
    run(straight, ScheduledOptimizer(straight, settings, peak=0.1, total_steps=4), range(4))
    before = parameters()
    optimizer = ScheduledOptimizer(before, settings, peak=0.1, total_steps=4)
    run(before, optimizer, range(stop))
    state = optimizer.state()
    run(before, optimizer, range(stop, 4))  # a state is a copy: going on does not change it
    after = parameters()
    fresh = ScheduledOptimizer(after, settings, peak=0.1, total_steps=4)
    replay = parameters()
    run(replay, ScheduledOptimizer(replay, settings, peak=0.1, total_steps=4), range(stop))
    with torch.no_grad():
        for target, source in zip(after, replay, strict=True):
            target.copy_(source)
    fresh.load_state(state)
    run(after, fresh, range(stop, 4))
    for wanted, resumed in zip(straight, after, strict=True):
        assert torch.equal(wanted, resumed)


def test_a_gradient_that_is_not_finite_is_refused_and_not_applied() -> None:
    tensors = parameters()
    optimizer = ScheduledOptimizer(tensors, OptimizerSettings(), peak=0.1, total_steps=4)
    set_gradients(tensors, 0)
    assert tensors[0].grad is not None
    tensors[0].grad[0, 0] = float("nan")
    with pytest.raises(InvalidRequest, match=r"diverged at step 0.*lower the learning rate"):
        optimizer.step(0)
    assert torch.equal(tensors[0], parameters()[0])


def test_a_foreign_state_is_refused() -> None:
    tensors = parameters()
    optimizer = ScheduledOptimizer(tensors, OptimizerSettings(), peak=0.1, total_steps=4)
    for state in ({"0.exp_avg": torch.zeros(2)}, {"9.exp_avg": torch.zeros(3, 4)}):
        with pytest.raises(InvalidRequest, match="does not fit"):
            optimizer.load_state(state)


def test_states_of_a_byte_stay_close_to_float32() -> None:
    """The same noisy quadratic; moments of small tensors are float32 in both."""
    generator = torch.Generator().manual_seed(0)
    target, small = torch.randn(80, 100, generator=generator), torch.randn(60, generator=generator)
    found: dict[str, list[Tensor]] = {}
    both: tuple[States, ...] = ("float32", "8bit")
    for states in both:
        noise = torch.Generator().manual_seed(1)
        tensors = [torch.zeros(80, 100, requires_grad=True), torch.zeros(60, requires_grad=True)]
        optimizer = MasterOptimizer(tensors, states=states)
        for _ in range(60):
            optimizer.zero_grad()
            for tensor, wanted in zip(tensors, (target, small), strict=True):
                shaken = wanted + 0.3 * torch.randn(wanted.shape, generator=noise)
                torch.autograd.backward((tensor - shaken).square().sum())
            optimizer.apply(learning_rate=0.02, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, max_grad_norm=None)
        found[states] = [tensor.detach() for tensor in tensors]
    assert torch.equal(found["float32"][1], found["8bit"][1])
    moved = float(found["float32"][0].norm())
    assert 0 < float((found["float32"][0] - found["8bit"][0]).norm()) < 0.02 * moved


def test_states_of_a_byte_are_small_and_resume_bit_by_bit() -> None:
    def steps(tensor: Tensor, optimizer: MasterOptimizer, count: range) -> None:
        for number in count:
            optimizer.zero_grad()
            torch.autograd.backward((tensor * torch.linspace(-1, 1, tensor.numel()) * (number + 1)).sum())
            optimizer.apply(learning_rate=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, max_grad_norm=1.0)

    straight = torch.zeros(5000, requires_grad=True)
    steps(straight, MasterOptimizer([straight], states="8bit"), range(4))
    before = torch.zeros(5000, requires_grad=True)
    optimizer = MasterOptimizer([before], states="8bit")
    steps(before, optimizer, range(2))
    state = optimizer.state()
    assert sum(value.nbytes for value in state.values()) < 1.1 * STATE_BYTES * 5000
    after = before.detach().clone().requires_grad_()
    resumed = MasterOptimizer([after], states="8bit")
    resumed.load_state(state)
    steps(after, resumed, range(2, 4))
    assert torch.equal(after, straight)
    with pytest.raises(InvalidRequest, match="does not fit"):
        MasterOptimizer([after]).load_state(state)


def test_bytes_name_every_value_to_a_few_percent() -> None:
    values = torch.cat([10.0 ** torch.linspace(-6, 0, 255), torch.zeros(1)])
    for signed in (True, False):
        known = levels(signed=signed)
        assert known.shape == (256,)
        assert bool((known.diff() > 0).all())
        codes, scale = encode(values * 3, known)
        found = decode(codes, scale, known)
        near = values > 1e-1
        assert float((found / (values * 3) - 1)[near].abs().max()) < 0.1
        assert float(found[-1]) == 0.0
        assert bool((found[:-1] > 0).all()) or signed

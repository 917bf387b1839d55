"""The fused forward and its runner against the plain ones: same plans, same logits, whatever the caches held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import tests.kernels.gpu.interpreter  # noqa: F401
from services.common.adapters.drafter_form import DrafterForm
from services.engine.executors.cuda.runner import RunnerOptions
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.requests.adapter import BASE_PIN, AdapterPin
from services.engine.requests.request import Pooling, Request
from services.engine.requests.sampling_params import SamplingParams
from services.engine.scheduler.config import SchedulerConfig
from tests.parity.fused_models import TINY, decoded, random_model
from tests.parity.in_step import InStep
from tests.parity.roundings import recorded_roundings, rounded_activations

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LIMITS = SchedulerConfig(max_num_seqs=4, token_budget=80, block_size=16, num_blocks=60, num_slots=12, max_model_len=512)


def requests(*lengths: int, tokens: int = 3, adapters: Sequence[int] = ()) -> list[Request]:
    """Greedy requests; request n uses adapter adapters[n], 0 for none."""
    generator = torch.Generator().manual_seed(3)
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    made = []
    for n, length in enumerate(lengths):
        prompt = tuple(torch.randint(6, 61, (length,), generator=generator).tolist())
        slot = adapters[n] if n < len(adapters) else 0
        pin = AdapterPin(f"a@{slot}", "digest" * slot, slot) if slot else BASE_PIN
        made.append(Request(f"r{n}", prompt, sampling, pin, arrival=n))
    return made


def test_prefill_decode_and_mixed_steps() -> None:
    """More than a tile in one prompt, more rows than the products of few rows take, tokens that only the device
    knows."""
    run = InStep(random_model(TINY, torch.float32), random_model(TINY, torch.float32, DEVICE), LIMITS, pending=True)
    run.run(requests(1, 66, 5, tokens=2), arrivals=1)
    assert run.steps == 4


def test_given_tokens() -> None:
    """Beside drawn ones: the next step finds them on the device, and both runners say the same of them."""
    run = InStep(random_model(TINY, torch.float32), random_model(TINY, torch.float32, DEVICE), LIMITS, pending=True)
    drawn = requests(3, 2, tokens=3)
    given = (60, 7, 31)
    forced = replace(drawn[1], request_id="given", sampling=SamplingParams.forcing(given, 0.7), arrival=9)
    results = run.run([*drawn, forced])
    assert tuple(results["given"].output_ids) == given != tuple(results["r1"].output_ids)
    assert run.steps == 3


def test_prompts_are_read() -> None:
    """More rows than a tile in one step, others in the middle of a prompt; beside decodes, and beside a prompt that
    nobody asks about. The logits that the readers compute are not those of the same rows in both, so only results are
    compared."""
    limits = replace(LIMITS, token_budget=36)
    run = InStep(random_model(TINY, torch.float32), random_model(TINY, torch.float32, DEVICE), limits, pending=True)
    run.compares_logits = False
    short, long, plain, mean = requests(2, 40, 3, 7, tokens=2)
    run.run(
        [
            replace(short, pooling=Pooling.LAST),
            replace(long, prompt_logprobs=5, pooling=Pooling.LAST),
            plain,
            replace(mean, prompt_logprobs=0, prompt_logprobs_from=5, pooling=Pooling.MEAN),
        ],
        arrivals=2,
    )
    assert run.reports == 4
    assert run.steps == 3


@pytest.mark.thorough
def test_prompts_are_read_beside_draft_tokens() -> None:
    """Of the first only log-probabilities are wanted, of the second a vector as well."""
    limits = replace(LIMITS, token_budget=16, draft_tokens=2)
    models = (random_model(TINY, torch.float32, device, mtp=True) for device in ("cpu", DEVICE))
    run = InStep(*models, limits)
    run.compares_logits = False
    first, second = requests(2, 6, tokens=2)
    run.run([replace(first, prompt_logprobs=1), replace(second, prompt_logprobs=2, pooling=Pooling.MEAN)], arrivals=1)
    assert run.reports == 2


def test_blocks_are_drawn_as_on_a_cpu() -> None:
    """Of two layers, four of seven tokens; one answer comes later."""
    form = DrafterForm(7, 2)
    limits = replace(LIMITS, token_budget=24, draft_tokens=4)
    models = (random_model(TINY, torch.float32, device, mtp=True, form=form) for device in ("cpu", DEVICE))
    run = InStep(*models, limits)
    run.compares_logits = False
    run.run(requests(3, 6, tokens=5), arrivals=1)
    assert run.drafts > 2


def test_adapters_of_a_batch() -> None:
    """Rows with two adapters and with none, in prefills and in decodes; kernels cut as for any other batch."""
    run = InStep(
        random_model(TINY, torch.float32),
        random_model(TINY, torch.float32, DEVICE),
        LIMITS,
        adapters=2,
        options=RunnerOptions(batch_invariant=True),
    )
    run.run(requests(3, 2, 4, tokens=2, adapters=(2, 0, 1)))
    assert run.steps == 2


@pytest.mark.thorough
def test_writes_to_states_wait() -> None:
    """As in large batches: prompts cut so that single tokens of theirs are computed as decodes are, before and between
    chunks, and answers long enough that states are written back meanwhile."""
    config = replace(TINY, layer_types=("linear_attention", "linear_attention"))
    limits = replace(LIMITS, token_budget=4, max_num_seqs=3)
    run = InStep(random_model(config, torch.float32), random_model(config, torch.float32, DEVICE), limits, late=True)
    run.run(requests(1, 9, 6, tokens=8), arrivals=1)
    assert run.steps > 8
    waiting = run.runner._cache.waiting
    assert waiting is not None
    assert (waiting.spans[:, 1:] % 16 > waiting.spans[:, 1:] // 16).any()


def test_a_cached_prefix_is_restored() -> None:
    """Snapshots are taken and restored on the device, and another sequence gets a slot that was used."""
    limits = replace(LIMITS, block_size=4, num_blocks=20, max_num_seqs=1, num_slots=4)
    run = InStep(random_model(TINY, torch.float32), random_model(TINY, torch.float32, DEVICE), limits)
    first = requests(14, tokens=1)[0]
    longer = replace(first, request_id="longer", prompt_token_ids=(*first.prompt_token_ids[:13], 7, 8), arrival=1)
    run.run([first])
    assert run.run([longer])["longer"].cached_tokens == 13


QUANTIZABLE = replace(
    TINY, hidden_size=128, intermediate_size=128, linear_value_dim=64, layer_types=("linear_attention",)
)
"""int4 has groups of 128 inputs."""


def test_fp8_and_int4_matrices() -> None:
    """Few rows: weights alone are quantized, so the answer is that of their decoded numbers."""
    for kind in ("fp8", "int4"):
        fused = random_model(QUANTIZABLE, torch.float32, DEVICE, quantization=kind)
        run = InStep(decoded(fused), fused, LIMITS)
        run.run(requests(3, 2, tokens=1))
        assert run.steps == 1


def logits_of_twenty(fused: Qwen3_5, length: int) -> tuple[Tensor, Tensor]:
    """Those of a step of 20 prompts of that length, float64 on the CPU: by the fused forward, and by the plain one with
    the decoded matrices."""
    limits = replace(LIMITS, max_num_seqs=20, num_slots=24, token_budget=20 * length)
    run = InStep(decoded(fused), fused, limits, tolerance=float("inf"))
    run.run(requests(*[length] * 20, tokens=1))
    assert run.steps == 1
    return run.ours[0].double().cpu(), run.expected[0].double()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dtype", "length", "share"),
    [
        (torch.float32, 4, 0.1),
        pytest.param(torch.bfloat16, 4, 0.1, marks=pytest.mark.cuda),
        pytest.param(torch.bfloat16, 15, 0.06, marks=pytest.mark.cuda),
    ],
    ids=str,
)
def test_many_rows_of_fp8_matrices(dtype: torch.dtype, length: int, share: float) -> None:
    """Beyond the rows of the streaming products activations are rounded to e4m3 too. That alone moves these logits by
    at least this share of their norm: the answer is the one of a plain model that rounds as much."""
    fused = random_model(QUANTIZABLE, dtype, DEVICE, quantization="fp8")
    ours, exact = logits_of_twenty(fused, length)
    with rounded_activations() as rows:
        _, rounded = logits_of_twenty(fused, length)
    assert rows == [20 * length] * 4
    moved = (rounded - exact).norm()
    assert moved > share * exact.norm()
    if dtype == torch.float32 and DEVICE.type == "cpu":
        assert (ours - rounded).norm() < 0.1 * moved
    else:  # numbers that lie near the middle of two are rounded up here and down there: the next test leaves that out
        assert (ours - exact).norm() < 1.1 * moved


@pytest.mark.thorough
def test_many_rows_of_fp8_matrices_rounded_alike() -> None:
    """The same without chance: the plain model takes over which numbers ours rounded up and which down, having checked
    that together they are as near to its own as the nearest. What is left is the error of sums; tensor cores keep some
    14 bits of those."""
    fused = random_model(QUANTIZABLE, torch.float32, DEVICE, quantization="fp8")
    with recorded_roundings() as chosen:
        ours, exact = logits_of_twenty(fused, 4)
    with rounded_activations(chosen[-4:], allowed=1.01) as rows:
        _, rounded = logits_of_twenty(fused, 4)
    assert rows == [80] * 4
    assert (ours - rounded).norm() < 0.01 * (rounded - exact).norm()


FP8_SUMS = 5e-3
"""Largest error of these logits by the sums of float8 tensor cores, which keep some 14 bits: a hundredth of what the
roundings of the activations move them by."""


def test_a_decode_behind_many_rows_of_fp8_matrices() -> None:
    """Prompts of several lengths in one step, whose activations are rounded, and a step of few rows, which rounds none
    and finds their states."""
    fused = random_model(QUANTIZABLE, torch.float32, DEVICE, quantization="fp8")
    tolerance = 2e-4 if DEVICE.type == "cpu" else FP8_SUMS
    run = InStep(decoded(fused, torch.float64), fused, LIMITS, tolerance=tolerance, follows=1.01)
    run.run(requests(68, 10, tokens=2))
    assert run.steps == 2


def test_fp8_pages() -> None:
    config = replace(TINY, layer_types=("full_attention",))
    run = InStep(
        random_model(config, torch.float32),
        random_model(config, torch.float32, DEVICE),
        LIMITS,
        kv_dtype=torch.float8_e4m3fn,
        tolerance=0.2,
    )
    run.run(requests(20, 3, tokens=2))
    assert max(run.errors) > 1e-3


def test_bfloat16_states() -> None:
    config = replace(TINY, layer_types=("linear_attention",))
    run = InStep(
        random_model(config, torch.float32),
        random_model(config, torch.float32, DEVICE),
        LIMITS,
        state_dtype=torch.bfloat16,
        tolerance=0.1,
    )
    run.run(requests(20, 3, tokens=2))
    assert max(run.errors) > 1e-4

"""The same code on a GPU: the answers of float32 on the CPU, in float32 and within rounding in bfloat16.

Selected only where there is a GPU (`-m cuda`); nothing here is about speed.
"""

from __future__ import annotations

import copy

import pytest
import torch

from services.common.jobs import LoraSettings
from services.engine.compute_sharing.host_lock import SliceGate
from services.engine.models.lora.binding import bind_adapter
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.requests.adapter import AdapterPin
from services.engine.requests.request import Request
from services.engine.requests.sampling_params import SamplingParams
from tests.parity.conftest import Pair
from tests.parity.reference import CONFIGS
from tests.parity.test_scheduled_generation import MAX_TOKENS, generate, prompts, serve
from tests.parity.test_serving_while_training import exact_gradients, gradients, relative

pytestmark = pytest.mark.cuda


def load(pair: Pair, dtype: str) -> Qwen3_5:
    return Qwen3_5.from_directory(pair.path, dtype=dtype, device="cuda")


def greedy_requests() -> list[Request]:
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    return [Request(f"r{n}", prompt, sampling, arrival=n) for n, prompt in enumerate(prompts())]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("changes", [{}, {"token_budget": 9}, {"num_blocks": 9}], ids=["large", "small", "preempted"])
def test_greedy_text_is_that_of_generate(pairs: dict[str, Pair], name: str, changes: dict[str, int]) -> None:
    results, preemptions = serve(load(pairs[name], "float32"), greedy_requests(), arrivals=5, **changes)
    for result in results:
        assert list(result.output_ids) == generate(pairs[name].reference, result.request.prompt_token_ids)
    assert (preemptions > 0) == ("num_blocks" in changes)


def test_seeded_samples_are_those_of_the_cpu(pairs: dict[str, Pair]) -> None:
    def requests() -> list[Request]:
        return [
            Request(f"r{n}", prompt, SamplingParams(seed=n, top_p=0.95, max_tokens=8, ignore_eos=True), arrival=n)
            for n, prompt in enumerate(prompts())
        ]

    there, _ = serve(load(pairs["grouped"], "float32"), requests(), arrivals=13)
    here, _ = serve(pairs["grouped"].model, requests(), arrivals=13)
    assert [list(r.output_ids) for r in there] == [list(r.output_ids) for r in here]


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_those_of_float64(pairs: dict[str, Pair], name: str) -> None:
    """On the CPU. Between two float32 results lie the errors of both: 6e-5 of the CPU's alone for odd-groups."""
    exact = exact_gradients(pairs[name])
    ours = gradients(load(pairs[name], "float32"), SliceGate(0.02, synchronize=torch.cuda.synchronize), 1)
    assert len(ours) == len(exact)
    for one, other in zip(ours, exact, strict=True):
        assert relative(one, other) < 1e-4


@pytest.mark.parametrize("name", CONFIGS)
def test_bfloat16_is_right_within_rounding(pairs: dict[str, Pair], name: str) -> None:
    """No farther from float32 arithmetic on the same rounded weights than transformers in bfloat16 is."""
    model = load(pairs[name], "bfloat16")
    tokens = torch.randint(0, 211, (200,), generator=torch.Generator().manual_seed(0))
    rounded = copy.deepcopy(pairs[name].reference).to(torch.bfloat16)
    with torch.no_grad():
        ours = model.logits(
            model.forward_train(tokens.to(model.device), [200], None, recompute="none", give_way=lambda: None)
        )
        theirs = rounded(tokens[None]).logits[0]
        exact = rounded.float()(tokens[None]).logits[0]
    assert relative(ours, exact) < 1.5 * relative(theirs, exact)
    results, _ = serve(model, greedy_requests(), arrivals=5)
    assert all(result.output_ids for result in results)


def test_adapters_of_a_batch_are_those_of_the_cpu(pairs: dict[str, Pair]) -> None:
    """Rows with two adapters and with none in one batch."""

    def run(model: Qwen3_5) -> list[list[int]]:
        slots = LoraSlots(model.config, 3, 4, model.dtype, model.device)
        for slot in (1, 2):
            params = LoraParams.create(model.config, LoraSettings(rank=4))
            generator = torch.Generator().manual_seed(slot)
            with torch.no_grad():
                for parameter in params.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
            slots.load(slot, bind_adapter(params.to_files("test"), config=model.config, max_rank=4))
        requests = [
            Request(
                r.request_id, r.prompt_token_ids, r.sampling, AdapterPin(f"a@{n % 3}", "d" * (n % 3), n % 3), arrival=n
            )
            if n % 3
            else r
            for n, r in enumerate(greedy_requests())
        ]
        results, _ = serve(model, requests, arrivals=5, lora=slots)
        return [list(result.output_ids) for result in results]

    here = run(pairs["grouped"].model)
    assert run(load(pairs["grouped"], "float32")) == here
    plain, _ = serve(pairs["grouped"].model, greedy_requests(), arrivals=5)
    assert here != [list(result.output_ids) for result in plain]

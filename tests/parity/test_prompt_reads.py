"""Log-probabilities and vectors of prompts equal transformers', however the prompts are cut, batched or preempted."""

from __future__ import annotations

import copy
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3_5ForCausalLM

from services.engine.models.lora.slots import LoraSlots
from services.engine.requests.outputs import SequenceUpdate
from services.engine.requests.request import Pooling, Request
from services.engine.requests.sampling_params import SamplingParams
from services.engine.scheduler.config import SchedulerConfig
from services.engine.scheduler.scheduler import Scheduler
from tests.parity.conftest import Pair
from tests.parity.reference import reference_logits
from tests.parity.test_scheduled_generation import make_runner, updates_of

BAR = 1e-4
ALTERNATIVES = 3
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


def prompts() -> list[tuple[int, ...]]:
    """Prompts of lengths around blocks and chunks; the last three begin alike."""
    generator = torch.Generator().manual_seed(9)
    made = [tuple(torch.randint(6, 211, (length,), generator=generator).tolist()) for length in (1, 2, 33, 64, 90)]
    return [*made, (*made[-1][:50], 7, 8), (*made[-1][:50], 9)]


@torch.no_grad()
def reference_hidden(reference: Qwen3_5ForCausalLM, tokens: tuple[int, ...]) -> Tensor:
    """[T, hidden] behind the final norm, computed in float64, as reference_logits()."""
    exact = copy.deepcopy(reference.model).double()
    with (
        patch.object(torch, "float32", torch.float64),
        patch.object(torch, "float", torch.float64),
        patch.object(Tensor, "float", Tensor.double),
    ):
        return exact(torch.tensor([list(tokens)])).last_hidden_state[0]


def serve(
    pair: Pair, requests: list[Request], *, arrivals: int, **changes: int | bool
) -> dict[str, list[SequenceUpdate]]:
    """All updates of each request; ``arrivals`` new ones come a step."""
    limits: dict[str, int | bool] = {
        "max_num_seqs": 8,
        "token_budget": 200,
        "block_size": 16,
        "num_blocks": 100,
        "num_slots": 24,
        "max_model_len": 512,
        **changes,
    }
    config = SchedulerConfig(**limits)
    lora = LoraSlots(pair.model.config, 1, 4, pair.model.dtype, pair.model.device)
    runner = make_runner(pair.model, config, lora)
    scheduler = Scheduler(config, runner.depth)
    updates: dict[str, list[SequenceUpdate]] = {request.request_id: [] for request in requests}
    for update in updates_of(scheduler, runner, requests, arrivals):
        updates[update.request_id].append(update)
    return updates


def check_logprobs(pair: Pair, request: Request, updates: list[SequenceUpdate]) -> None:
    told = [update.prompt for update in updates if update.prompt is not None]
    prompt, first = request.prompt_token_ids, max(1, request.prompt_logprobs_from)
    expected = torch.log_softmax(reference_logits(pair.reference, prompt), -1)[first - 1 : len(prompt) - 1]
    if not len(expected):
        assert not told
        return
    own = expected.gather(1, torch.tensor(prompt[first:])[:, None])
    logprobs = np.concatenate([scores.logprobs for scores in told])
    assert np.abs(logprobs - own.squeeze(1).numpy()).max() <= BAR
    # A rank is that of some logits within the bar: those that are nearly alike may change places.
    ranks = torch.from_numpy(np.concatenate([scores.ranks for scores in told]))
    assert ((expected > own + BAR).sum(-1) + 1 <= ranks).all()
    assert (ranks <= (expected > own - BAR).sum(-1)).all()
    ids = np.concatenate([scores.top_ids for scores in told])
    tops = np.concatenate([scores.top_logprobs for scores in told])
    assert ids.shape == tops.shape == (len(expected), ALTERNATIVES)
    assert np.abs(tops - expected.topk(ALTERNATIVES).values.numpy()).max() <= BAR
    assert np.abs(tops - expected.gather(1, torch.from_numpy(ids).long()).numpy()).max() <= BAR
    same = ids == np.array(prompt[first:])[:, None]
    assert (tops[same] == logprobs[same.any(1)]).all(), "the prompt's own token among the alternatives"


CASES = pytest.mark.parametrize(
    ("arrivals", "changes"),
    [
        (9, {}),
        (1, {"token_budget": 9}),
        (2, {"num_blocks": 12, "token_budget": 20}),
        (2, {"block_size": 4, "num_blocks": 80}),
    ],
    ids=["at once", "small chunks", "few blocks", "small blocks"],
)


@CASES
def test_log_probabilities_of_prompts(pairs: dict[str, Pair], arrivals: int, changes: dict[str, int]) -> None:
    """Beside requests that want none, of which some are preempted; and some only of the end of the prompt, whose
    beginning may come from the cache."""
    pair = pairs["grouped"]
    asked = [
        Request(f"r{n}", prompt, GREEDY, arrival=n, prompt_logprobs=ALTERNATIVES) for n, prompt in enumerate(prompts())
    ]
    ends = [
        replace(request, request_id=f"end{n}", prompt_logprobs_from=48)
        for n, request in enumerate(asked)
        if len(request.prompt_token_ids) > 50
    ]
    others = [replace(request, request_id=f"plain{n}", prompt_logprobs=None) for n, request in enumerate(asked[:5])]
    # The least urgent ones are those that are preempted.
    last = [replace(request, priority=1) for request in asked]
    updates = serve(pair, [*last, *ends, *others], arrivals=arrivals, **changes)
    cut = 0
    for request in (*asked, *ends):
        check_logprobs(pair, request, updates[request.request_id])
        finished = updates[request.request_id][-1].finished
        assert finished is not None
        parts = sum(update.prompt is not None for update in updates[request.request_id])
        cut += finished.preemptions > 0 and parts > 1
        if not request.prompt_logprobs_from:
            assert updates[request.request_id][0].cached_tokens == 0
    assert cut > 0 or changes.get("num_blocks") != 12, "preempted after some of its prompt had been told"
    assert any(updates[request.request_id][0].cached_tokens for request in ends) or changes.get("num_blocks") == 12
    for request in others:
        assert all(update.prompt is None and update.token is not None for update in updates[request.request_id])


@CASES
def test_vectors_of_prompts(pairs: dict[str, Pair], arrivals: int, changes: dict[str, int]) -> None:
    pair = pairs["odd-heads"]
    once = replace(GREEDY, max_tokens=1)
    asked = [
        Request(f"{pooling.value}{n}", prompt, once, arrival=n, pooling=pooling)
        for n, prompt in enumerate(prompts())
        for pooling in Pooling
    ]
    updates = serve(pair, asked, arrivals=arrivals, **changes)
    for request in asked:
        *_, told, last = updates[request.request_id]
        assert told.embedding is not None
        assert last.finished is not None
        assert sum(update.embedding is not None for update in updates[request.request_id]) == 1
        hidden = reference_hidden(pair.reference, request.prompt_token_ids)
        expected = hidden[-1] if request.pooling is Pooling.LAST else hidden.mean(0)
        assert np.abs(told.embedding - expected.numpy()).max() <= BAR

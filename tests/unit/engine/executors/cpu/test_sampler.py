"""The batched sampler against a straightforward one-row reference."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from services.engine.executors.cpu.sampler import Sampler
from services.engine.executors.rng import FIRST_BLOCK, exponential, row_keys
from services.engine.requests.outputs import SampledToken
from services.engine.requests.request import Request
from services.engine.requests.sampling_params import SamplingParams
from services.engine.scheduler.step_plan import Chunk

VOCAB = 300
EOS = 7
_ids = itertools.count()


def chunk(params: SamplingParams, output: list[int] | None = None, prompt: tuple[int, ...] = (1, 2, 3)) -> Chunk:
    request = Request(f"r{next(_ids)}", prompt, params)
    return Chunk(request, [1], 3, [1], 1, True, output or [], len(output or []))


def sampler() -> Sampler:
    return Sampler([EOS], torch.device("cpu"))


def random_logits(rows: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def reference_edit(logits: torch.Tensor, c: Chunk) -> torch.Tensor:
    """Unbatched float64 statement of the edits up to and including temperature."""
    p = c.request.sampling
    x = logits.double().clone()
    for token, bias in p.logit_bias.items():
        x[token] += bias
    if len(c.output_ids) < p.min_tokens:
        for token in p.stop_token_ids | (frozenset() if p.ignore_eos else {EOS}):
            x[token] = -math.inf
    for token in set(c.request.prompt_token_ids) | set(c.output_ids):
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in set(c.output_ids):
        x[token] -= p.frequency_penalty * list(c.output_ids).count(token) + p.presence_penalty
    return x if p.greedy else x / p.temperature


def reference_allowed(x: torch.Tensor, p: SamplingParams) -> set[int]:
    allowed = set(range(len(x)))
    probabilities = x.softmax(0)
    allowed = {t for t in allowed if probabilities[t] >= p.min_p * probabilities.max()}
    order = sorted(allowed, key=lambda t: -float(x[t]))
    if p.top_k:
        order = order[: p.top_k]
    mass = float(probabilities[order].sum())
    kept, total = [], 0.0
    for token in order:
        if total / mass >= p.top_p:
            break
        kept.append(token)
        total += float(probabilities[token])
    return set(kept)


def reference_token(logits: torch.Tensor, c: Chunk) -> int:
    p = c.request.sampling
    x = reference_edit(logits, c)
    if p.greedy:
        return int(x.argmax())
    keys = row_keys(np.array([p.seed], dtype=np.uint64), np.array([len(c.output_ids)], dtype=np.uint64))
    noise = exponential(torch.from_numpy(keys), torch.arange(len(x), dtype=torch.int32))[0].double()
    race = x.softmax(0) / noise
    return max(reference_allowed(x, p), key=lambda t: float(race[t]))


PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 1},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.0, "top_k": 200},
    {"temperature": 0.9, "top_p": 0.5},
    {"temperature": 5.0, "top_p": 0.99},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 8.0, "min_p": 0.01},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 3.0, "top_k": 150, "top_p": 0.9, "min_p": 0.001},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 1.0, "repetition_penalty": 0.7, "presence_penalty": 1.0},
    {"temperature": 1.0, "frequency_penalty": 1.5, "top_p": 0.8},
    {"temperature": 1.0, "presence_penalty": -1.0},
    {"temperature": 0.0, "logit_bias": {5: 100.0, 6: 100.0}},
    {"temperature": 1.0, "logit_bias": {5: -100.0, 9: 3.0}},
    {"temperature": 1.0, "min_tokens": 3, "stop_token_ids": frozenset({11, 12}), "logit_bias": {11: 50.0}},
    {"temperature": 0.0, "min_tokens": 3, "logit_bias": {EOS: 100.0}},
    {"temperature": 0.0, "min_tokens": 3, "ignore_eos": True, "logit_bias": {EOS: 100.0}},
]


@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_every_row_of_a_mixed_batch_equals_the_reference(scale: float) -> None:
    outputs: list[list[int]] = [[], [4, 4, 9], [4, 4, 9, 5, 6, 4]]
    chunks = [
        chunk(SamplingParams(seed=17 * i + j, **{"max_tokens": 9, **fields}), output)
        for i, fields in enumerate(PARAMS)
        for j, output in enumerate(outputs)
    ]
    for trial in range(4):
        logits = random_logits(len(chunks), trial, scale)
        tokens = sampler().sample(logits, chunks)
        for row, c in enumerate(chunks):
            assert tokens[row].token_id == reference_token(logits[row], c), (trial, c.request.sampling)


@pytest.mark.parametrize("fields", PARAMS)
def test_alone_equals_in_company(fields: dict[str, Any]) -> None:
    logits = random_logits(40, 3)
    mine = chunk(SamplingParams(seed=99, **{"max_tokens": 9, **fields}), [4, 9])
    company = [chunk(SamplingParams(seed=i, temperature=1.0, top_k=i * 7, top_p=0.9)) for i in range(39)]
    alone = sampler().sample(logits[20:21], [mine])[0]
    together = sampler().sample(logits, [*company[:20], mine, *company[20:]])[20]
    assert alone.token_id == together.token_id
    assert alone.sampling_logprob == pytest.approx(together.sampling_logprob, abs=1e-5)


def test_rows_kept_between_steps_count_new_tokens() -> None:
    """The same sampler over several steps, with a changing batch, equals a fresh sampler each step."""
    params = SamplingParams(seed=1, temperature=1.0, frequency_penalty=1.0, repetition_penalty=1.3, min_tokens=2)
    request = Request("r", (1, 2), params)
    other = chunk(SamplingParams(seed=2))
    kept = sampler()
    output: list[int] = []
    for step in range(12):
        logits = random_logits(2, step)
        c = Chunk(request, [1], 3, [1], 1, True, list(output), len(output))
        chunks = [c, other] if step % 3 else [c]
        token = kept.sample(logits[: len(chunks)], chunks)[0]
        assert token == sampler().sample(logits[: len(chunks)], chunks)[0]
        output.append(token.token_id)


def test_rows_behind_draft_tokens_are_those_behind_the_same_output() -> None:
    """Draft tokens that are not taken leave nothing behind: the same sampler over several steps equals a fresh one."""
    shared: dict[str, Any] = {"max_tokens": 99, "repetition_penalty": 1.5, "frequency_penalty": 0.8}
    requests = [
        Request(f"{seed}", (1, 2, 3), SamplingParams(seed=seed, **fields))
        for seed, fields in enumerate(
            [shared, shared | {"min_tokens": 6, "logit_bias": {EOS: 9.0, 11: 8.0}}, {"temperature": 0.0, **shared}]
        )
    ]
    kept, outputs = sampler(), [[4, 4], [9], list[int]()]
    for step in range(5):
        drafts = [[4, 9, 4, EOS], [11, 11], [5, 5, 5, 6]]
        chunks = [
            Chunk(request, [1, *drafted], 3, [1], 1, True, output, len(output), num_draft_tokens=len(drafted))
            for request, output, drafted in zip(requests, outputs, drafts, strict=True)
        ]
        rows = [row for c in chunks for row in c.rows]
        plain = [
            Chunk(c.request, [1], 3, [1], 1, True, list(c.output_ids) + list(c.drafts[:place]), c.output_count + place)
            for c in chunks
            for place in range(c.sampled_rows)
        ]
        logits = random_logits(len(rows), step, 1.0)
        tokens = kept.sample(logits, rows)
        for place, one in enumerate(plain):
            assert tokens[place] == sampler().sample(logits[place : place + 1], [one])[0]
        for output, drafted in zip(outputs, drafts, strict=True):
            output.extend(drafted[:step])


@pytest.mark.parametrize("block", [1, 2, 4, 1024])
def test_the_distribution_is_softmax(block: int) -> None:
    """Whether all tokens race or blocks of them first, the last of which is not full."""
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5]]).repeat(20000, 1)
    # A seed's draws differ by how many tokens came before, which nothing else here reads.
    params = SamplingParams(seed=5, temperature=0.8)
    chunks = [chunk(params)._replace(output_count=count) for count in range(20000)]
    drawn = Sampler([EOS], torch.device("cpu"), block=block).sample(logits, chunks)
    tokens = torch.tensor([t.token_id for t in drawn])
    expected = (logits[0] / 0.8).softmax(0) * len(tokens)
    chi_square = float(((tokens.bincount(minlength=5) - expected) ** 2 / expected).sum())
    assert chi_square < 18.5  # 4 degrees of freedom, p = 0.001


def test_blocks_race_before_their_tokens() -> None:
    """A block that is masked is never drawn, and a row's draw is one of its own noise, whatever the other rows."""
    logits = random_logits(6, 0)
    logits[:, 32:] = -math.inf
    logits[3, 40] = 2.0
    chunks = [chunk(SamplingParams(seed=row)) for row in range(6)]
    small = Sampler([EOS], torch.device("cpu"), block=16)
    tokens = [token.token_id for token in small.sample(logits, chunks)]
    keys = torch.from_numpy(row_keys(np.arange(6, dtype=np.uint64), np.zeros(6, dtype=np.uint64)))
    for row, token in enumerate(tokens):
        mass = torch.stack([part.double().exp().sum() for part in logits[row].split(16)])
        names = torch.arange(len(mass), dtype=torch.int32) + FIRST_BLOCK
        block = int((mass / exponential(keys[row : row + 1], names)[0].double()).argmax())
        ids = torch.arange(16 * block, min(16 * block + 16, logits.shape[1]), dtype=torch.int32)
        race = logits[row, ids].double().exp() / exponential(keys[row : row + 1], ids)[0].double()
        assert token == int(ids[race.argmax()])
    assert all(token < 32 or token == 40 for token in tokens)
    assert small.sample(logits[2:3], chunks[2:3])[0].token_id == tokens[2]


def test_noise_is_exponential_and_independent() -> None:
    seeds = np.repeat(np.arange(64, dtype=np.uint64), 4)
    counters = np.tile(np.arange(4, dtype=np.uint64), 64)
    noise = exponential(torch.from_numpy(row_keys(seeds, counters)), torch.arange(4096, dtype=torch.int32)).double()
    assert float(noise.min()) > 0
    assert math.isfinite(float(noise.max()))
    assert float(noise.mean()) == pytest.approx(1.0, abs=0.01)
    assert float(noise.var()) == pytest.approx(1.0, abs=0.03)
    centred = (noise - noise.mean()) / noise.std()
    rows = centred @ centred.T / noise.shape[1]
    assert float((rows - torch.diag(rows.diag())).abs().max()) < 0.1
    columns = (centred[:, :-1] * centred[:, 1:]).mean()
    assert abs(float(columns)) < 0.01


def test_logprobs_are_of_the_raw_distribution() -> None:
    params = SamplingParams(seed=1, temperature=0.5, top_k=3, top_logprobs=4, logit_bias={3: 5.0}, max_tokens=3)
    quiet = SamplingParams(seed=2, temperature=0.5, top_logprobs=None)
    sampled_only = SamplingParams(temperature=0.0, top_logprobs=0)
    logits = random_logits(3)
    loud, silent, greedy = sampler().sample(logits, [chunk(params), chunk(quiet), chunk(sampled_only)])
    raw = logits.double().log_softmax(-1)
    behaviour = (logits.double() / 0.5).log_softmax(-1)
    assert loud.logprob == pytest.approx(float(raw[0, loud.token_id]), abs=1e-5)
    assert loud.sampling_logprob == pytest.approx(float(behaviour[0, loud.token_id]), abs=1e-5)
    assert list(loud.top_ids) == raw[0].topk(4).indices.tolist()
    assert list(loud.top_logprobs) == pytest.approx(raw[0].topk(4).values.tolist(), abs=1e-5)
    assert (silent.logprob, list(silent.top_ids)) == (None, [])
    assert greedy.logprob == pytest.approx(float(raw[2].max()), abs=1e-5)
    assert greedy.sampling_logprob == pytest.approx(greedy.logprob, abs=1e-6)
    assert list(greedy.top_ids) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.5, "top_k": 4}])
def test_a_bad_row_ends_alone(bad: float, fields: dict[str, Any]) -> None:
    logits = random_logits(3)
    chunks = [chunk(SamplingParams(seed=i, **fields)) for i in range(3)]
    healthy = sampler().sample(logits, chunks)
    broken = logits.clone()
    broken[1, 40] = bad
    tokens = sampler().sample(broken, chunks)
    assert tokens[1].error is not None
    assert [tokens[0], tokens[2]] == [healthy[0], healthy[2]]
    everything = torch.full_like(logits, bad)
    assert all(token.error for token in sampler().sample(everything, chunks))


def test_ties_do_not_depend_on_the_sort() -> None:
    """With all logits equal, top_k keeps every tied token instead of whichever a sort put first."""
    logits = torch.zeros(1, VOCAB)
    drawn = {
        sampler().sample(logits, [chunk(SamplingParams(seed=s, top_k=2, temperature=1.0))])[0].token_id
        for s in range(200)
    }
    assert len(drawn) > 50


def test_extreme_temperatures_stay_finite() -> None:
    logits = random_logits(2)
    cold, hot = sampler().sample(
        logits, [chunk(SamplingParams(seed=1, temperature=1e-30)), chunk(SamplingParams(seed=1, temperature=100.0))]
    )
    assert cold.token_id == int(logits[0].argmax())
    assert cold.error is None
    assert hot.sampling_logprob == pytest.approx(-math.log(VOCAB), abs=0.5)


def test_unseeded_requests_differ() -> None:
    logits = torch.zeros(8, VOCAB)
    tokens = sampler().sample(logits, [chunk(SamplingParams()) for _ in range(8)])
    assert len({token.token_id for token in tokens}) > 4


def test_the_logits_are_left_alone() -> None:
    logits = random_logits(1)
    before = logits.clone()
    sampler().sample(logits, [chunk(SamplingParams(temperature=0.5, top_k=3, presence_penalty=1.0), [4])])
    assert torch.equal(logits, before)


def test_nothing_to_sample() -> None:
    assert sampler().sample(torch.empty(0, VOCAB), []) == list[SampledToken]()

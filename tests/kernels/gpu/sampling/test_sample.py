"""The sampler of the GPU chooses the tokens that services/engine/executors/cpu/sampler.py chooses, row by row.

Exact equality cannot hold where two races are equal to the resolution of float32: the kernel compares weight / E, the
reference logit - log E, and their logarithms differ in the last bit. The gap between the two largest races has density
1 at 0, so a gap below 1e-5 has a probability of 1e-5 a row: the seeds here meet none.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from kernels.gpu.sampling.sample import SamplingConfig
from services.engine.constraints.masks import RowMasks
from services.engine.constraints.vocabulary import allow, allows
from services.engine.executors.cpu.sampler import Sampler
from services.engine.executors.cuda.sampling.mask_upload import MaskUpload
from services.engine.executors.cuda.sampling.sampler import CudaSampler
from services.engine.executors.cuda.stream import EngineStream
from services.engine.requests.outputs import SampledToken
from services.engine.requests.request import Request
from services.engine.requests.sampling_params import SamplingParams
from services.engine.scheduler.step_plan import PENDING, Chunk
from tests.kernels.gpu import interpreter  # noqa: F401

VOCAB = 300
EOS = 7
_ids = itertools.count()


def chunk(params: SamplingParams, slot: int, output: list[int] | None = None, request: Request | None = None) -> Chunk:
    request = request or Request(f"r{next(_ids)}", (1, 2, 3, 40), params)
    output = output or []
    return Chunk(request, [1], 3, [1], slot, True, output, len(output))


def run(sampler: CudaSampler, logits: torch.Tensor, chunks: list[Chunk]) -> list[SampledToken]:
    results = sampler.launch(logits, sampler.prepare(chunks))
    return sampler.read(results.words.cpu())


def fresh(device: torch.device, vocab: int = VOCAB, rows: int = 80, block: int = 128) -> CudaSampler:
    return CudaSampler([EOS], rows + 2, vocab, rows, device, config=SamplingConfig(block))


def reference(logits: torch.Tensor, chunks: list[Chunk], block: int = 128) -> list[SampledToken]:
    return Sampler([EOS], torch.device("cpu"), block=block).sample(logits.cpu().float(), chunks)


def assert_same(mine: list[SampledToken], theirs: list[SampledToken]) -> None:
    for row, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert (a.token_id, a.error, list(a.top_ids)) == (b.token_id, b.error, list(b.top_ids)), row
        assert a.sampling_logprob == pytest.approx(b.sampling_logprob, abs=2e-5), row
        assert (a.logprob is None) == (b.logprob is None)
        if a.logprob is not None:
            assert a.logprob == pytest.approx(b.logprob, abs=2e-5)
            assert list(a.top_logprobs) == pytest.approx(list(b.top_logprobs), abs=2e-5)


def random_logits(rows: int, device: torch.device, seed: int, scale: float, vocab: int = VOCAB) -> torch.Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale).to(device)


PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_logprobs": 5},
    {"temperature": 1.3, "top_k": 1},
    {"temperature": 1.3, "top_k": 5, "top_logprobs": 20},
    {"temperature": 1.0, "top_k": 200},
    {"temperature": 1.0, "top_k": 299},
    {"temperature": 1.0, "top_k": 4000, "top_p": 0.7},
    {"temperature": 0.9, "top_p": 0.5},
    {"temperature": 0.9, "top_p": 1e-9},
    {"temperature": 5.0, "top_p": 0.99},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 8.0, "min_p": 0.01},
    {"temperature": 1.0, "min_p": 1.0, "top_p": 0.5},
    {"temperature": 2.0, "min_p": 0.02, "top_p": 0.6},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 3.0, "top_k": 150, "top_p": 0.9, "min_p": 0.001},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 1.0, "repetition_penalty": 0.7, "presence_penalty": 1.0},
    {"temperature": 1.0, "frequency_penalty": 1.5, "top_p": 0.8},
    {"temperature": 1.0, "presence_penalty": -1.0, "top_logprobs": 0},
    {"temperature": 0.0, "logit_bias": {5: 100.0, 6: 100.0}},
    {"temperature": 1.0, "logit_bias": {5: -100.0, 9: 3.0}, "top_k": 30},
    {"temperature": 1.0, "min_tokens": 3, "stop_token_ids": frozenset({11, 12}), "logit_bias": {11: 50.0}},
    {"temperature": 0.0, "min_tokens": 3, "logit_bias": {EOS: 100.0}},
    {"temperature": 0.0, "min_tokens": 3, "ignore_eos": True, "logit_bias": {EOS: 100.0}},
    {"temperature": 100.0},
    {"temperature": 1e-30},
]


def batch(seed: int) -> list[Chunk]:
    outputs: list[list[int]] = [[], [4, 4, 9, 5, 6, 4]]
    return [
        chunk(SamplingParams(seed=seed + i, **{"max_tokens": 9, **fields}), i + 1, outputs[i % 2])
        for i, fields in enumerate(PARAMS)
    ]


def test_a_mixed_batch_equals_the_reference(device: torch.device) -> None:
    chunks = batch(1000)
    logits = random_logits(len(chunks), device, 1000, 3.0)
    logits[::3] /= 10
    before = logits.clone()
    sampler = fresh(device)
    expected = reference(logits, chunks)
    assert_same(run(sampler, logits, chunks), expected)
    assert torch.equal(logits, before)
    assert sampler.last_tokens[1 : len(chunks) + 1].tolist() == [token.token_id for token in expected]


def test_random_parameters_equal_the_reference(device: torch.device) -> None:
    draw = random.Random(5)

    def some(*values: Any) -> Any:
        return draw.choice(values)

    chunks = []
    for row in range(16):
        output = [draw.randrange(VOCAB) for _ in range(draw.randrange(6))]
        params = SamplingParams(
            temperature=some(0.0, 1.0, draw.uniform(0.2, 3.0)),
            top_p=some(1.0, draw.uniform(0.01, 0.999)),
            top_k=some(0, draw.randrange(1, VOCAB)),
            min_p=some(0.0, 0.0, draw.uniform(0.0, 0.2)),
            seed=draw.randrange(2**64),
            presence_penalty=some(0.0, draw.uniform(-2, 2)),
            frequency_penalty=some(0.0, draw.uniform(-2, 2)),
            repetition_penalty=some(1.0, draw.uniform(0.5, 2)),
            logit_bias=some({}, {draw.randrange(VOCAB): draw.uniform(-100, 100)}),
            min_tokens=some(0, 4),
            max_tokens=9,
            top_logprobs=some(None, 0, 3),
        )
        chunks.append(chunk(params, row + 1, output))
    logits = random_logits(len(chunks), device, 9, 2.0)
    assert_same(run(fresh(device), logits, chunks), reference(logits, chunks))


def test_the_real_vocabulary(device: torch.device) -> None:
    """The interpreter gets large blocks, so that it has few programs to run."""
    fields = [{}, {"top_p": 0.95}, {"top_k": 50, "top_p": 0.9}, {"temperature": 0.0, "top_logprobs": 3}]
    chunks = [chunk(SamplingParams(seed=i, **f), i + 1) for i, f in enumerate(fields)]
    logits = random_logits(len(chunks), device, 3, 1.0, vocab=248_320)
    block = 32_768 if device.type == "cpu" else SamplingConfig().block
    assert_same(run(fresh(device, 248_320, block=block), logits, chunks), reference(logits, chunks, block))


def test_bfloat16_logits(device: torch.device) -> None:
    """They are full of ties; equal logits are all in or all out."""
    fields = [{}, {"top_k": 20}, {"temperature": 0.7, "top_p": 0.8}]
    chunks = [chunk(SamplingParams(seed=i, **f), i + 1) for i, f in enumerate(fields)]
    logits = random_logits(len(chunks), device, 4, 1.0).bfloat16()
    assert_same(run(fresh(device), logits, chunks), reference(logits, chunks))


def test_ties_are_all_in(device: torch.device) -> None:
    logits = torch.zeros(6, VOCAB, device=device)
    chunks = [chunk(SamplingParams(seed=i, top_k=2), i + 1) for i in range(6)]
    assert_same(run(fresh(device), logits, chunks), reference(logits, chunks))


def test_a_bad_row_ends_alone(device: torch.device) -> None:
    fields = [{"temperature": 0.0}, {}, {"top_p": 0.5, "top_k": 4}]
    chunks = [chunk(SamplingParams(seed=i, **f), i + 1) for i, f in enumerate([*fields, *fields])]
    logits = random_logits(6, device, 0, 3.0)
    broken = logits.clone()
    broken[3:, 140] = torch.tensor([math.nan, math.inf, math.nan], device=device)
    broken[5] = math.inf
    sampler = fresh(device)
    tokens = run(sampler, broken, chunks)
    assert_same(tokens[:3], reference(logits, chunks)[:3])
    assert all(token.error is not None for token in tokens[3:])
    assert all(0 <= token < VOCAB for token in sampler.last_tokens.tolist())
    # What a bad row leaves behind harms no later step.
    assert_same(run(sampler, logits, chunks), reference(logits, chunks))


def test_steps_are_bit_equal_when_repeated(device: torch.device) -> None:
    chunks = batch(7)[8:16]
    logits = random_logits(len(chunks), device, 7, 1.0)
    first, second = (
        sampler.launch(logits, sampler.prepare(chunks)).words.cpu() for sampler in (fresh(device), fresh(device))
    )
    assert torch.equal(first, second)


PENALISED = SamplingParams(
    seed=1, frequency_penalty=1.0, presence_penalty=0.5, repetition_penalty=1.3, min_tokens=2, max_tokens=99
)


def test_a_pending_token_is_counted(device: torch.device) -> None:
    """Each step is prepared before the host knows the token of the step before."""
    sampler, request = fresh(device), Request("r", (1, 2), PENALISED)
    output: list[int] = []
    expected: list[int] = []
    unread = None
    for count in range(6):
        logits = random_logits(1, device, count, 1.0)
        pending = Chunk(request, [PENDING if count else 2], 2 + count, [1], 5, True, output, count)
        rows = sampler.prepare([pending])
        if unread is not None:
            output.append(sampler.read(unread.cpu())[0].token_id)
        unread = sampler.launch(logits, rows).words
        known = Chunk(request, [1], 2 + count, [1], 5, True, list(expected), count)
        expected.append(reference(logits, [known])[0].token_id)
    assert [*output, int(sampler.last_tokens[5])] == expected


def test_draft_tokens_that_a_row_follows_are_counted(device: torch.device) -> None:
    """Only there: what is drawn, and what follows is not taken, leaves nothing in the counts."""
    fields: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"top_p": 0.8, "min_tokens": 5, "logit_bias": {EOS: 6.0, 9: 3.0}},
        {"top_k": 9, "temperature": 0.7},
    ]
    drafts = [[4, 9, 4, 4], [9, 9], [EOS, 11, EOS], []]
    chunks = []
    for row, (changes, drafted) in enumerate(zip(fields, drafts, strict=True)):
        params = SamplingParams(
            seed=row, max_tokens=99, repetition_penalty=1.6, frequency_penalty=1.0, presence_penalty=0.3, **changes
        )
        asked = Request(f"r{row}", (1, 2, 3, 40), params)
        chunks.append(Chunk(asked, [1, *drafted], 3, [1], row + 1, True, [4, 9], 2, num_draft_tokens=len(drafted)))
    sampler = CudaSampler([EOS], 9, VOCAB, 20, device, config=SamplingConfig(128), speculative=True)
    followed = torch.full((20, 4), -1, dtype=torch.int32, device=device)
    alone, places = [], []
    for chunk_at, one in enumerate(chunks):
        for place in range(one.sampled_rows):
            places.append(5 * chunk_at + place)
            followed[places[-1], :place] = torch.tensor(one.drafts[:place], dtype=torch.int32)
            alone.append(chunk(one.request.sampling, 1, [4, 9, *one.drafts[:place]], one.request))
    for seed in range(2):
        logits = random_logits(20, device, seed, 0.5)
        words = sampler.launch(logits, sampler.prepare(chunks, 5), drafted=followed).words.cpu()
        found = sampler.read(words)
        assert_same([found[place] for place in places], reference(logits[places], alone))


def test_a_request_that_moves_and_comes_back_is_counted_anew(device: torch.device) -> None:
    """Draft tokens may have been accepted in between, so that its count alone does not tell."""
    sampler, request = fresh(device), Request("r", (1, 2), PENALISED)
    output: list[int] = []
    for step, slot in enumerate([3, 4, 4, 3]):
        logits = random_logits(1, device, step, 1.0)
        mine = chunk(PENALISED, slot, list(output), request)
        token = run(sampler, logits, [mine])[0]
        assert_same([token], reference(logits, [mine]))
        output.append(token.token_id)


def test_a_sequence_that_starts_again_is_counted_anew(device: torch.device) -> None:
    sampler, request = fresh(device), Request("r", (1, 2), PENALISED)
    output: list[int] = []
    # It keeps its slot, moves, comes back after another request had its first slot, and computes a token again.
    for step, slot in enumerate([3, 3, 4, 4, 3, 3]):
        logits = random_logits(1, device, step, 1.0)
        if step == 4:
            run(sampler, logits, [chunk(SamplingParams(presence_penalty=2.0), 3, [8, 8])])
        mine = chunk(PENALISED, slot, list(output), request)
        token = run(sampler, logits, [mine])[0]
        assert_same([token], reference(logits, [mine]))
        if step != 1:
            output.append(token.token_id)


def test_counts_cannot_be_made_of_tokens_that_are_not_known(device: torch.device) -> None:
    with pytest.raises(RuntimeError, match="known"):
        fresh(device).prepare([Chunk(Request("r", (1,), PENALISED), [PENDING], 3, [1], 2, True, [5], 2)])


def test_edit_rows_are_handed_on(device: torch.device) -> None:
    """More requests with penalties than rows are held at a time, each a few steps long."""
    sampler = fresh(device)
    biased = SamplingParams(seed=3, temperature=0.0, logit_bias={9: 100.0}, max_tokens=9)
    for step in range(6):
        slots = [1 + 3 * step + i for i in range(3)]
        chunks = [chunk(PENALISED if slot % 2 else biased, slot, [4, 4]) for slot in slots]
        logits = random_logits(3, device, step, 1.0)
        assert_same(run(sampler, logits, chunks), reference(logits, chunks))
    assert sampler._tables.words.shape[0] == 4


def test_padding_rows_write_nothing(device: torch.device) -> None:
    sampler = fresh(device)
    chunks = [chunk(SamplingParams(seed=1, top_p=0.9, presence_penalty=1.0), 2, [4])]
    logits = random_logits(3, device, 2, 1.0)
    step = torch.tensor([[2, 0, 0], [1, 0, 0], [-1, -1, -1]], dtype=torch.int32, device=device)
    words = sampler.launch(logits, sampler.prepare(chunks), step).words
    assert_same(sampler.read(words[:1].cpu()), reference(logits[:1], chunks))
    assert sampler.last_tokens.nonzero().flatten().tolist() in ([2], [])


def test_too_many_rows_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="rows"):
        fresh(device, rows=2).prepare([chunk(SamplingParams(), i + 1) for i in range(3)])


def test_nothing_to_sample(device: torch.device) -> None:
    assert run(fresh(device), torch.empty(0, VOCAB, device=device), []) == []


def test_a_request_that_missed_a_step_gets_another_edit_row(device: torch.device) -> None:
    """As many requests with penalties as there may be rows, one of which pauses while a new one comes."""
    sampler = fresh(device, rows=2)
    requests = [Request(name, (1, 2), PENALISED) for name in "abc"]
    outputs: list[list[int]] = [[4], [4], [4]]
    for step, present in enumerate([(0, 1), (1, 2), (2, 0), (0, 2)]):
        chunks = [chunk(PENALISED, 1 + i, list(outputs[i]), requests[i]) for i in present]
        logits = random_logits(2, device, step, 1.0)
        tokens = run(sampler, logits, chunks)
        assert_same(tokens, reference(logits, chunks))
        for i, token in zip(present, tokens, strict=True):
            outputs[i].append(token.token_id)
    assert sampler._tables.words.shape[0] == 2


def test_a_nucleus_that_refuses_most_winners(device: torch.device) -> None:
    """Flat logits and a small top_p: the short way fails once, twice and goes the long way."""
    shares = [0.9, 0.6, 0.4, 0.2, 0.1, 0.03]
    chunks = [chunk(SamplingParams(seed=i, top_p=shares[i % len(shares)]), i + 1) for i in range(18)]
    logits = random_logits(len(chunks), device, 21, 0.3)
    sampler = fresh(device)
    expected = reference(logits, chunks)
    for _ in range(2):
        assert_same(run(sampler, logits, chunks), expected)


def test_a_given_token_is_scored_as_if_it_had_been_drawn(device: torch.device) -> None:
    """Bit by bit, whatever else is in the batch; and it is where the next step looks for it."""
    logits = random_logits(8, device, 31, 2.0)
    settings: list[dict[str, Any]] = [{"temperature": t} for t in (1.0, 0.7, 0.0, 1.0)]
    settings += [{"top_p": 0.8}, {"top_k": 9}, {"presence_penalty": 1.0, "top_logprobs": 3}, {"temperature": 1.3}]
    chunks = [chunk(SamplingParams(seed=i, **f), i + 1, [4]) for i, f in enumerate(settings)]
    drawn = run(fresh(device), logits, chunks)
    plain = [row for row, fields in enumerate(settings) if fields.keys() == {"temperature"}]
    unlikely = int(logits[3].argmin())
    mixed = list(chunks)
    for row in plain:
        token = unlikely if row == 3 else drawn[row].token_id
        mixed[row] = chunk(SamplingParams.forcing((1, token, 2), settings[row]["temperature"]), row + 1, [1])
    sampler = fresh(device)
    found = run(sampler, logits, mixed)
    assert [a == b for a, b in zip(found, drawn, strict=True)] == [row != 3 for row in range(8)]
    assert found[3].token_id == unlikely
    assert found[3].sampling_logprob == pytest.approx(float(logits[3].log_softmax(-1)[unlikely]), abs=2e-5)
    assert sampler.last_tokens[1:9].tolist() == [token.token_id for token in found]
    assert_same(found, reference(logits, mixed))
    # The slots' next requests draw again.
    assert run(sampler, logits, chunks) == drawn


def test_given_tokens_are_taken_in_turn(device: torch.device) -> None:
    """Steps are prepared before the host knows the tokens of those ahead."""
    given = (9, EOS, 0, VOCAB - 1)
    sampler, request = fresh(device), Request("r", (1, 2), SamplingParams.forcing(given, 1.0))
    for count, token in enumerate(given):
        pending = Chunk(request, [PENDING if count else 2], 1 + count, [1], 5, True, [], count)
        logits = random_logits(1, device, count, 1.0)
        found = sampler.read(sampler.launch(logits, sampler.prepare([pending])).words.cpu())[0]
        assert (found.token_id, int(sampler.last_tokens[5])) == (token, token)
        assert found.sampling_logprob == pytest.approx(float(logits[0].log_softmax(-1)[token]), abs=2e-5)


def test_a_bad_row_of_a_given_token_is_an_error(device: torch.device) -> None:
    logits = random_logits(2, device, 1, 1.0)
    logits[1, 140] = math.nan
    chunks = [chunk(SamplingParams.forcing((4,), 1.0), slot) for slot in (1, 2)]
    assert [token.error is None for token in run(fresh(device), logits, chunks)] == [True, False]


def random_masks(rows: list[int], seed: int, vocab: int = VOCAB) -> RowMasks:
    """Few or many allowed tokens a row, never none; bits beyond the vocabulary are set, too."""
    draw = random.Random(seed)
    bits = np.zeros((len(rows), -(-vocab // 32)), dtype=np.int32)
    for row in bits:
        allow(row, draw.sample(range(vocab), draw.choice([1, 2, 5, 60, vocab])))
    bits.view(np.uint32)[:, -1] |= np.uint32(0xFFFFFFFF << (vocab % 32) & 0xFFFFFFFF if vocab % 32 else 0)
    return RowMasks(rows, bits)


def run_masked(sampler: CudaSampler, logits: torch.Tensor, chunks: list[Chunk], masks: RowMasks) -> list[SampledToken]:
    upload = MaskUpload(EngineStream(logits.device), len(chunks) + 3, logits.shape[1])
    return sampler.read(sampler.launch(logits, sampler.prepare(chunks), masks=upload.send(masks)).words.cpu())


def reference_masked(logits: torch.Tensor, chunks: list[Chunk], masks: RowMasks) -> list[SampledToken]:
    return Sampler([EOS], torch.device("cpu"), block=128).sample(logits.cpu().float(), chunks, masks)


@pytest.mark.parametrize("seed", [0, 1])
def test_masked_rows_equal_the_reference(device: torch.device, seed: int) -> None:
    """Rows of all kinds, masked and not, in one batch; what is said of likelihoods is the plain model's."""
    chunks = batch(2000 + seed)
    logits = random_logits(len(chunks), device, 40 + seed, 3.0)
    masks = random_masks([row for row in range(len(chunks)) if row % 3 != seed], seed)
    tokens = run_masked(fresh(device), logits, chunks, masks)
    assert_same(tokens, reference_masked(logits, chunks, masks))
    for at, row in enumerate(masks.rows):
        assert allows(masks.bits[at], tokens[row].token_id), row
    plain = reference(logits, chunks)
    unmasked = sorted(set(range(len(chunks))) - set(masks.rows))
    assert [tokens[row].token_id for row in unmasked] == [plain[row].token_id for row in unmasked]


def test_a_masked_row_may_take_only_the_least_likely_token(device: torch.device) -> None:
    """Far below what the others' weights can be told from zero at, with every filter."""
    fields: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.9}]
    chunks = [chunk(SamplingParams(seed=i, **f), i + 1) for i, f in enumerate(fields)]
    logits = random_logits(len(chunks), device, 5, 1.0)
    logits[:, 77] = -5000.0
    bits = np.zeros((len(chunks), -(-VOCAB // 32)), dtype=np.int32)
    for row in bits:
        allow(row, [77])
    masks = RowMasks(range(len(chunks)), bits)
    tokens = run_masked(fresh(device), logits, chunks, masks)
    assert [token.token_id for token in tokens] == [77] * len(chunks)
    assert_same(tokens, reference_masked(logits, chunks, masks))


def test_masks_of_another_vocabulary_are_refused(device: torch.device) -> None:
    upload = MaskUpload(EngineStream(device), 4, VOCAB)
    with pytest.raises(ValueError, match="words"):
        upload.send(random_masks([0], 0, vocab=64))
    sampler = fresh(device)
    chunks = [chunk(SamplingParams(), 1)]
    sent = MaskUpload(EngineStream(device), 4, 64).send(random_masks([0], 0, vocab=64))
    with pytest.raises(ValueError, match="masks"):
        sampler.launch(random_logits(1, device, 0, 1.0), sampler.prepare(chunks), masks=sent)

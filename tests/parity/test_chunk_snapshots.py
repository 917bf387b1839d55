"""Snapshots inside of chunks and copies of blocks: states, keys and tokens are those of separate steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import tests.kernels.gpu.interpreter  # noqa: F401
from services.engine.executors.cpu.runner import ModelRunner
from services.engine.models.batch import CacheBuffers
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.requests.adapter import AdapterPin
from services.engine.requests.prompt_scoring import PromptRead
from services.engine.requests.request import Pooling, Request
from services.engine.requests.sampling_params import SamplingParams
from services.engine.scheduler.config import SchedulerConfig
from services.engine.scheduler.step_plan import BlockCopy, Chunk, StateCopy, StepPlan, StepResult, segments
from tests.parity.fused_models import TINY, cuda_runner, random_adapters, random_model, spoil
from tests.parity.in_step import record, record_steps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = 2e-4
LIMITS = SchedulerConfig(
    max_num_seqs=6, token_budget=300, block_size=16, num_blocks=60, num_slots=24, max_model_len=512
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def tokens(count: int, seed: int = 1) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(1, 61, (count,), generator=generator).tolist())


def prompt(name: str, count: int, adapter: int = 0, **fields: object) -> Request:
    pin = AdapterPin(f"a@{adapter}", "digest", adapter) if adapter else AdapterPin()
    return Request(name, tokens(count, seed=count), GREEDY, pin, **fields)


def chunk(request: Request, start: int, end: int, slot: int, first_block: int, *snapshots: tuple[int, int]) -> Chunk:
    known = request.prompt_token_ids
    samples = end == len(known)
    blocks = range(first_block, first_block + -(-len(known) // LIMITS.block_size))
    next_id = -1 if samples else known[end]
    return Chunk(
        request, known[start:end], start, list(blocks), slot, samples, [], 0, next_id=next_id, snapshots=snapshots
    )


def in_steps(plan: StepPlan) -> list[StepPlan]:
    """The same without snapshots inside of chunks: a step for each of their links."""
    steps: list[StepPlan] = []
    chains = [segments(chunk) for chunk in plan.chunks]
    for turn in range(max(map(len, chains))):
        chunks: list[Chunk] = []
        copies: list[StateCopy] = []
        for whole, chain in zip(plan.chunks, chains, strict=True):
            if turn < len(chain):
                link, last = chain[turn], turn + 1 == len(chain)
                chunks.append(link._replace(out_slot=whole.out_slot))
                copies += [] if last else [StateCopy(whole.slot, link.out_slot)]
        # A link of one token that samples is a decode then, and those come first.
        chunks.sort(key=lambda chunk: not chunk.is_decode)
        steps.append(StepPlan(chunks, copies_after=copies))
    first = replace(steps[0], copies_before=plan.copies_before, block_copies=plan.block_copies)
    last = replace(steps[-1], copies_after=[*steps[-1].copies_after, *plan.copies_after])
    return [first, last] if len(steps) == 2 else [first, *steps[1:-1], last]


class Plain:
    """A runner that computes with torch, and what it says.

    Args:
        model: of float32.
    """

    def __init__(self, model: Qwen3_5, *, adapters: int = 0, speculative: bool = False) -> None:
        self.cache: CacheBuffers = model.allocate_cache(LIMITS.num_blocks, LIMITS.block_size, LIMITS.num_slots)
        spoil(self.cache)
        lora = random_adapters(model, adapters)
        self.runner = ModelRunner(
            model, self.cache, lora, num_slots=LIMITS.num_slots, eos_token_ids=[0], speculative=speculative
        )
        self.logits: list[Tensor] = []
        record(model, "logits", self.logits)

    def run(self, plans: Sequence[StepPlan]) -> list[StepResult]:
        self.logits.clear()
        return [self.runner.execute(plan) for plan in plans]

    def drafts(self, slots: Sequence[int]) -> list[list[int]]:
        """Draft tokens of the last step."""
        assert self.runner._speculation is not None
        return [list(self.runner._speculation._answers[slot].drafts) for slot in slots]

    def states(self, slots: Sequence[int]) -> list[Tensor]:
        return [pool[list(slots)] for pool in (*self.cache.conv_states, *self.cache.recurrent_states)]


def by_request(plans: Sequence[StepPlan], results: Sequence[StepResult]) -> dict[str, tuple[int, float]]:
    """Tokens that were sampled for each request."""
    found: dict[str, tuple[int, float]] = {}
    for plan, result in zip(plans, results, strict=True):
        rows = [row for each in plan.chunks for row in each.rows]
        for row, token in zip(rows, result.tokens, strict=True):
            found[row.request.request_id] = token.token_id, token.sampling_logprob
    return found


@pytest.mark.parametrize(
    ("start", "ends", "end"),
    [
        (0, (8,), 9),
        (0, (9, 10, 11), 12),
        (16, (31, 64), 90),
        (5, (69,), 70),
        (0, (64, 128), 129),
        (3, (36, 37), 60),
    ],
)
def test_a_prompt_alone_is_bit_for_bit_what_its_parts_are(start: int, ends: tuple[int, ...], end: int) -> None:
    request = prompt("a", end)
    snapshots = [(position, 10 + place) for place, position in enumerate(ends)]
    before = [StepPlan([chunk(request, 0, start, 3, 5)])] if start else []
    plan = StepPlan([chunk(request, start, end, 3, 5, *snapshots)])
    whole, parts = Plain(random_model(TINY, torch.float32)), Plain(random_model(TINY, torch.float32))
    split = in_steps(plan)
    got, expected = whole.run([*before, plan]), parts.run([*before, *split])
    assert torch.equal(whole.logits[-1], parts.logits[-1])
    assert by_request([plan], got[-1:]) == by_request(split, expected[len(before) :])
    slots = [3, *(slot for _, slot in snapshots)]
    for ours, theirs in zip(whole.states(slots), parts.states(slots), strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(whole.states([3])[1], whole.states([10])[1])


def several() -> tuple[list[StepPlan], StepPlan]:
    """A decode, two prompts with snapshots, one of them with an adapter and in the middle, and one without; and what
    comes before."""
    decoding, longer, other, third = prompt("d", 20), prompt("l", 100, 1), prompt("o", 47), prompt("t", 33, 2)
    decode = Chunk(decoding, (7,), 20, [1, 2], 1, True, [7], 1)
    before = StepPlan([chunk(decoding, 0, 20, 1, 1), chunk(longer, 0, 17, 2, 5)])
    return [before], StepPlan(
        [
            decode,
            chunk(longer, 17, 100, 2, 5, (30, 12), (31, 13), (90, 14)),
            chunk(third, 0, 33, 4, 30),
            chunk(other, 0, 47, 3, 20, (32, 15)),
        ],
        copies_after=[StateCopy(4, 16)],
    )


def test_several_chains_and_ordinary_chunks_in_a_step() -> None:
    before, plan = several()
    whole, parts = (Plain(random_model(TINY, torch.float32), adapters=2) for _ in range(2))
    split = in_steps(plan)
    got, expected = whole.run([*before, plan]), parts.run([*before, *split])
    ours, theirs = by_request([plan], got[1:]), by_request(split, expected[1:])
    assert {name: token for name, (token, _) in ours.items()} == {name: token for name, (token, _) in theirs.items()}
    assert sorted(ours) == ["d", "l", "o", "t"]
    slots = [1, 2, 3, 4, 12, 13, 14, 15, 16]
    for mine, other in zip(whole.states(slots), parts.states(slots), strict=True):
        torch.testing.assert_close(mine, other, atol=2e-5, rtol=1e-5)


def test_prompts_are_read_through_snapshots() -> None:
    scored = prompt("a", 70, prompt_logprobs=2, pooling=Pooling.MEAN)
    reads = [PromptRead(0, 0, 70)]
    plain = StepPlan([chunk(scored, 0, 70, 3, 5)], reads=reads)
    with_snapshots = StepPlan([chunk(scored, 0, 70, 3, 5, (20, 10), (33, 11))], reads=reads)
    (one,), (other,) = (
        Plain(random_model(TINY, torch.float32)).run([plan])[0].reports for plan in (plain, with_snapshots)
    )
    assert one.scores is not None
    assert other.scores is not None
    assert other.scores.ranks.tolist() == one.scores.ranks.tolist()
    np.testing.assert_allclose(other.scores.logprobs, one.scores.logprobs, atol=1e-4)
    np.testing.assert_allclose(other.pooled, one.pooled, rtol=1e-4, atol=1e-4)


def test_draft_tokens_behind_a_prompt_with_snapshots() -> None:
    """The draft tokens read the mtp layer's keys of all rows, and are those of prompts without snapshots."""
    request, second = prompt("a", 50), prompt("b", 30)
    chunks = [chunk(request, 0, 50, 3, 5), chunk(second, 0, 30, 4, 20)]
    marked = [chunks[0]._replace(snapshots=((20, 10), (33, 11))), chunks[1]._replace(snapshots=((8, 12),))]
    drafts: list[list[list[int]]] = []
    caches: list[CacheBuffers] = []
    for each in (chunks, marked):
        plain = Plain(random_model(TINY, torch.float32, mtp=True), speculative=True)
        plain.run([StepPlan(each, drafts=True, num_draft_tokens=3)])
        drafts.append(plain.drafts([3, 4]))
        caches.append(plain.cache)
    assert drafts[0] == drafts[1]
    assert [len(each) for each in drafts[0]] == [3, 3]
    for pool, other in zip((*caches[0].keys, *caches[0].values), (*caches[1].keys, *caches[1].values), strict=True):
        torch.testing.assert_close(pool[5:8], other[5:8], atol=2e-5, rtol=1e-5)


def test_going_on_behind_a_snapshot_inside_of_a_block() -> None:
    """Two requests that begin alike: the second one takes the first one's snapshot and a copy of the block it ends
    in."""
    first = prompt("a", 40)
    second = Request("b", (*first.prompt_token_ids[:22], 5, 9, 11, 3), GREEDY)
    whole, alone = Plain(random_model(TINY, torch.float32)), Plain(random_model(TINY, torch.float32))
    whole.run([StepPlan([chunk(first, 0, 40, 3, 5, (22, 10))])])
    reused = chunk(second, 22, 26, 4, 20)._replace(blocks=[5, 21])
    going_on = StepPlan([reused], [StateCopy(10, 4)], block_copies=[BlockCopy(6, 21)])
    mine = by_request([going_on], whole.run([going_on]))
    computed = [StepPlan([chunk(second, 0, 22, 4, 30)]), StepPlan([chunk(second, 22, 26, 4, 30)])]
    assert mine == by_request(computed[1:], alone.run(computed)[1:])
    for pool in (*whole.cache.keys, *whole.cache.values):
        assert torch.equal(pool[21, :6], pool[6, :6]), "the copy"
        assert not torch.equal(pool[21, 6:10], pool[6, 6:10]), "what went on from it"


class Fused:
    """The GPU's runner, in the interpreter where there is none, and what it says."""

    def __init__(
        self, *, adapters: int = 0, speculative: bool = False, largest_graph: int = 0, waiting_writes: int | None = None
    ) -> None:
        model = random_model(TINY, torch.float32, DEVICE, mtp=speculative)
        limits = replace(LIMITS, draft_tokens=3 if speculative else 0, mixed_prefill_tokens=256)
        lora = random_adapters(model, adapters)
        self.runner = cuda_runner(model, limits, lora, largest_graph=largest_graph, waiting_writes=waiting_writes)
        self.cache = self.runner._cache
        self.logits: list[Tensor] = []
        record_steps(self.runner, self.logits)

    def run(self, plans: Sequence[StepPlan]) -> list[StepResult]:
        self.logits.clear()
        return [self.runner.launch(plan).result() for plan in plans]

    def check_states(self, plain: Plain, slots: Sequence[int]) -> None:
        """Against those of a plain runner."""
        assert len(plain.cache.conv_states) == len(self.cache.conv) == 1
        conv, recurrent = plain.states(slots)
        torch.testing.assert_close(self.cache.conv[0, list(slots)].cpu().mT, conv, atol=TOLERANCE, rtol=1e-4)
        torch.testing.assert_close(self.cache.recurrent[0, list(slots)].cpu(), recurrent, atol=TOLERANCE, rtol=1e-4)
        if self.cache.waiting is not None:
            spans = self.cache.waiting.spans[0, list(slots)]
            assert bool(((spans & 15) == spans >> 4).all()), "something waits"


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("start", "ends", "end"), [(0, (9, 10, 11), 12), (16, (31, 64), 90), (3, (36, 37), 60), (0, (8,), 72)]
)
@pytest.mark.parametrize("waiting_writes", [0, 3])
def test_chains_on_the_device(start: int, ends: tuple[int, ...], end: int, waiting_writes: int) -> None:
    request = prompt("a", end)
    snapshots = [(position, 10 + place) for place, position in enumerate(ends)]
    before = [StepPlan([chunk(request, 0, start, 3, 5)])] if start else []
    plan = StepPlan([chunk(request, start, end, 3, 5, *snapshots)])
    fused, parts = Fused(waiting_writes=waiting_writes), Plain(random_model(TINY, torch.float32))
    split = in_steps(plan)
    got, expected = fused.run([*before, plan]), parts.run([*before, *split])
    torch.testing.assert_close(fused.logits[-1].cpu(), parts.logits[-1], atol=TOLERANCE, rtol=0)
    assert got[-1].tokens[0].token_id == expected[-1].tokens[0].token_id
    fused.check_states(parts, [3, *(slot for _, slot in snapshots)])


@pytest.mark.thorough
@pytest.mark.parametrize("largest_graph", [0, pytest.param(8, marks=pytest.mark.cuda)])
def test_chains_and_ordinary_chunks_on_the_device(largest_graph: int) -> None:
    before, plan = several()
    fused = Fused(adapters=2, largest_graph=largest_graph)
    parts = Plain(random_model(TINY, torch.float32), adapters=2)
    split = in_steps(plan)
    replays = fused.runner.replays
    got, expected = fused.run([*before, plan]), parts.run([*before, *split])
    assert fused.runner.replays - replays == (2 if largest_graph else 0)
    ours, theirs = by_request([plan], got[1:]), by_request(split, expected[1:])
    assert {name: token for name, (token, _) in ours.items()} == {name: token for name, (token, _) in theirs.items()}
    for name, (_, logprob) in ours.items():
        assert abs(logprob - theirs[name][1]) < 10 * TOLERANCE
    fused.check_states(parts, [2, 3, 4, 12, 13, 14, 15, 16])


@pytest.mark.thorough
def test_reads_and_draft_tokens_on_the_device() -> None:
    """Of a step with chains: rows are found where they would be without."""
    scored = prompt("a", 70, prompt_logprobs=2, pooling=Pooling.MEAN)
    second = prompt("b", 30)
    chunks = [chunk(scored, 0, 70, 3, 5, (20, 10), (33, 11)), chunk(second, 0, 30, 4, 20, (8, 12))]
    plan = StepPlan(chunks, reads=[PromptRead(0, 0, 70)], drafts=True, num_draft_tokens=3)
    fused = Fused(speculative=True)
    plain = Plain(random_model(TINY, torch.float32, mtp=True), speculative=True)
    (ours,), (theirs,) = (
        fused.run([plan]),
        plain.run([replace(plan, chunks=[c._replace(snapshots=()) for c in chunks])]),
    )
    assert list(ours.accepted) == list(theirs.accepted) == [1, 1]
    assert fused.runner._speculation is not None
    assert fused.runner._speculation._slots.drafts[[3, 4], :3].tolist() == plain.drafts([3, 4])
    assert [token.token_id for token in ours.tokens] == [token.token_id for token in theirs.tokens]
    (mine,), (other,) = ours.reports, theirs.reports
    assert mine.scores is not None
    assert other.scores is not None
    assert mine.scores.ranks.tolist() == other.scores.ranks.tolist()
    np.testing.assert_allclose(mine.scores.logprobs, other.scores.logprobs, atol=TOLERANCE)
    np.testing.assert_allclose(mine.pooled, other.pooled, rtol=1e-4, atol=TOLERANCE)


def test_going_on_inside_of_a_block_on_the_device() -> None:
    first = prompt("a", 40)
    second = Request("b", (*first.prompt_token_ids[:22], 5, 9, 11, 3), GREEDY)
    fused, alone = Fused(), Plain(random_model(TINY, torch.float32))
    fused.run([StepPlan([chunk(first, 0, 40, 3, 5, (22, 10))])])
    reused = chunk(second, 22, 26, 4, 20)._replace(blocks=[5, 21])
    got = fused.run([StepPlan([reused], [StateCopy(10, 4)], block_copies=[BlockCopy(6, 21)])])
    computed = alone.run([StepPlan([chunk(second, 0, 26, 4, 30)])])
    assert got[0].tokens[0].token_id == computed[0].tokens[0].token_id
    torch.testing.assert_close(fused.logits[-1].cpu(), alone.logits[-1], atol=TOLERANCE, rtol=0)
    for page in fused.cache.pages:
        for pool in (page.keys, page.values):
            assert torch.equal(pool[21, :6], pool[6, :6])
            assert not torch.equal(pool[21, 6:10], pool[6, 6:10])

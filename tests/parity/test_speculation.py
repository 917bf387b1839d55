"""Speculation with the mtp layer: the tokens are those without it, whatever is drafted, batched, split or preempted."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from models.tiny.recipe.data import DIRECTORY, END, SKILLS, chat_template, held_out_items, prompt_text
from models.tiny.recipe.train_mtp import Mtp
from services.common.adapters.drafter_form import DrafterForm
from services.common.errors import CheckpointRejected
from services.engine.executors.cpu.runner import ModelRunner
from services.engine.executors.cpu.speculation import CpuSpeculation
from services.engine.models.checkpoint import checkpoint_digest
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.observability.status import Counts
from services.engine.requests.adapter import AdapterPin
from services.engine.requests.outputs import Finished
from services.engine.requests.request import Request
from services.engine.requests.sampling_params import SamplingParams
from services.engine.scheduler.config import SchedulerConfig
from services.engine.scheduler.scheduler import Scheduler
from services.engine.scheduler.step_plan import PENDING, Chunk, StepPlan, StepResult
from tests.parity.conftest import Pair
from tests.parity.fused_models import random_adapters, spoil
from tests.parity.reference import Driver, make_checkpoint
from tests.parity.test_scheduled_generation import EOS, MAX_TOKENS, make_runner, prompts, serve

GREEDY = SamplingParams(temperature=0.0, max_tokens=50)
ROOM = {"token_budget": 64, "draft_tokens": 4}


def random_mtp(reference: Mtp, seed: int = 5) -> dict[str, Tensor]:
    """Fills the layer and returns it as a checkpoint has it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            scale = 0.2 if "norm" in name else 0.7 * parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return {f"mtp.{name}": value.contiguous() for name, value in reference.state_dict().items()}


def make_pair(name: str, path: Path) -> tuple[Pair, Mtp]:
    reference = make_checkpoint(name, path)
    layer = Mtp(reference).eval()
    save_file(random_mtp(layer), path / "model-mtp.safetensors")
    return Pair(path, reference, Qwen3_5.from_directory(path, dtype="float32", device="cpu", mtp=True)), layer


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair("grouped", tmp_path_factory.mktemp("grouped"))[0]


def drafting_in_blocks(pair: Pair, form: DrafterForm, seed: int = 7) -> Qwen3_5:
    """The same model with a block drafter of random numbers."""
    model = Qwen3_5.from_directory(pair.path, dtype="float32", device="cpu", mtp=True, form=form)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator) * (0.2 if len(shape) == 1 else 0.7 * shape[-1] ** -0.5)
        for name, shape in model.config.drafter_shapes(form).items()
    }
    model.stage_drafter(tensors)()
    return model


@pytest.fixture(scope="module")
def blocks(grouped: Pair) -> Qwen3_5:
    return drafting_in_blocks(grouped, DrafterForm(12, 2))


@pytest.mark.parametrize("name", ["grouped", "odd-heads"])
@torch.no_grad()
def test_the_layer_is_transformers_layer(name: str, tmp_path: Path) -> None:
    """Over a prompt in chunks of every size: logits of the token after next."""
    pair, layer = make_pair(name, tmp_path)
    reference, model = pair.reference, pair.model
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 211, (70,), generator=generator)
    hidden = reference.model(input_ids=tokens[None]).last_hidden_state
    rotation = reference.model.rotary_emb(hidden, torch.arange(69)[None])
    expected = reference.lm_head(layer(reference.model.embed_tokens(tokens[None, 1:]), hidden[:, :-1], rotation))[0]
    for size in (1, 3, 69):
        driver = Driver(model)
        place = driver.open()
        rows = []
        for begin in range(0, 69, size):
            end = min(begin + size, 69)
            batch = driver.batch([(place, tokens[begin:end].tolist())])
            states, step = model.forward_all(batch, driver.cache, None)
            rows.append(model.logits(model.draft(states, tokens[begin + 1 : end + 1], step, driver.cache)))
            place.done = end
        assert (torch.cat(rows) - expected).abs().max() < 2e-4


@torch.no_grad()
def test_further_draft_tokens_are_of_the_layer_fed_its_own_output(tmp_path: Path) -> None:
    """Greedy ones, against the layer of transformers' parts run over all rows again. Blocks end among them."""
    pair, layer = make_pair("grouped", tmp_path)
    reference, model = pair.reference, pair.model
    cache = model.allocate_cache(12, 4, 5)
    spoil(cache)
    lora = LoraSlots(model.config, 1, 4, model.dtype, model.device)
    runner = ModelRunner(model, cache, lora, num_slots=5, eos_token_ids=[], speculative=True)
    generator = torch.Generator().manual_seed(2)
    requests = [
        Request(f"r{length}", tuple(torch.randint(0, 211, (length,), generator=generator).tolist()), GREEDY)
        for length in (13, 18)
    ]
    blocks = [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10]]
    chunks = [
        Chunk(request, request.prompt_token_ids, 0, blocks[slot - 1], slot, True, [], 0)
        for slot, request in enumerate(requests, 1)
    ]
    result = runner.launch(StepPlan(chunks, drafts=True, num_draft_tokens=4)).result()
    assert runner._speculation is not None
    for request, slot, token in zip(requests, (1, 2), result.tokens, strict=True):
        tokens = torch.tensor([*request.prompt_token_ids, token.token_id])[None]
        hidden = reference.model(input_ids=tokens[:, :-1]).last_hidden_state
        drafts: list[int] = []
        for _ in range(4):
            rotation = reference.model.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
            out = layer(reference.model.embed_tokens(tokens[:, 1:]), hidden, rotation)[:, -1:]
            drafts.append(int(reference.lm_head(out).argmax()))
            tokens = torch.cat((tokens, torch.tensor([[drafts[-1]]])), dim=1)
            hidden = torch.cat((hidden, out), dim=1)
        assert list(runner._speculation._answers[slot].drafts) == drafts


class Oracle:
    """Replaces what the layer drafted by the tokens that will be sampled, more often than not."""

    def __init__(self, known: list[Finished]) -> None:
        self._known = {result.request.request_id: list(result.output_ids) for result in known}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = CpuSpeculation._draw

        def draw(speculation: CpuSpeculation, out: Tensor, chunks: list[Chunk], count: int) -> None:
            plain(speculation, out, chunks, count)
            for chunk in chunks:
                answer = speculation._answers[chunk.slot]
                output = self._known[chunk.request.request_id]
                for place in range(count):
                    number = chunk.output_count + place
                    if number < len(output) and hash((number, chunk.request.arrival)) % 4:
                        answer.drafts[place] = output[number]

        monkeypatch.setattr(CpuSpeculation, "_draw", draw)


def mixed(seed: int) -> list[Request]:
    """Requests with a random mixture of all that changes the choice of a token."""
    chance = random.Random(seed)

    def some(*values: Any) -> Any:
        return chance.choice(values)

    made = []
    for n, prompt in enumerate(prompts()):
        most = some(8, MAX_TOKENS)
        sampling = SamplingParams(
            temperature=some(0.0, 0.7, 1.0, 1.5),
            top_p=some(1.0, 0.8),
            top_k=some(0, 30),
            min_p=some(0.0, 0.02),
            seed=n,
            presence_penalty=some(0.0, 1.5, -0.5),
            frequency_penalty=some(0.0, 0.9),
            repetition_penalty=some(1.0, 1.4, 0.8),
            logit_bias=some({}, {chance.randrange(211): chance.uniform(-3, 6) for _ in range(20)}),
            stop_token_ids=some(frozenset(), frozenset(range(60, 68))),
            min_tokens=some(0, 5, most),
            max_tokens=most,
            top_logprobs=some(None, 2),
        )
        pin = AdapterPin(f"a@{n % 3}", f"digest {n % 3}", n % 3) if n % 3 else AdapterPin()
        made.append(Request(f"r{n}", prompt, sampling, pin, arrival=n))
    return made


def requests(**sampling: object) -> list[Request]:
    """Greedy, seeded, filtered and penalised ones, some with an adapter and with tokens to stop at."""
    made = []
    for n, prompt in enumerate(prompts()):
        changes = (
            {"temperature": 0.0},
            {"seed": n},
            {"seed": n, "top_p": 0.8, "top_k": 20},
            {"seed": n, "presence_penalty": 0.5},
            {"temperature": 0.0, "top_logprobs": 2},
            {"seed": n, "min_tokens": 5},
            {"temperature": 0.0, "stop_token_ids": frozenset(range(60, 70))},
        )[n % 7]
        pin = AdapterPin(f"a@{n % 3}", f"digest {n % 3}", n % 3) if n % 3 else AdapterPin()
        limit = MAX_TOKENS if n % 4 else 7
        made.append(Request(f"r{n}", prompt, SamplingParams(max_tokens=limit, **changes), pin, arrival=n))
    return made


@pytest.fixture(scope="module")
def expected(grouped: Pair) -> list[Finished]:
    """What the requests get without speculation."""
    return serve(grouped.model, requests(), arrivals=13, lora=random_adapters(grouped.model, 2))[0]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("arrivals", "changes", "oracle"),
    [
        (13, {}, True),
        (13, {"draft_tokens": 1}, True),
        (13, {"draft_tokens": 2}, True),
        (13, {"draft_tokens": 3}, True),
        (13, {}, False),
        (1, {}, True),
        (2, {"token_budget": 32, "mixed_prefill_tokens": 8}, True),
        (13, {"num_blocks": 10}, True),
        (3, {"num_blocks": 34, "block_size": 4, "num_slots": 10}, True),
        (13, {"draft_tokens": 6}, True),
        pytest.param(13, {"draft_tokens": 12}, False, marks=pytest.mark.thorough),
        (3, {"draft_tokens": 12, "num_blocks": 34, "block_size": 4, "num_slots": 10}, True),
    ],
    ids=[
        "at once",
        "one",
        "two",
        "three",
        "bad drafts",
        "one by one",
        "small chunks",
        "few blocks",
        "few small blocks",
        "a part of a block",
        "a bad block",
        "a block beyond few small ones",
    ],
)
def test_tokens_are_the_same(
    grouped: Pair,
    blocks: Qwen3_5,
    expected: list[Finished],
    arrivals: int,
    changes: dict[str, int],
    oracle: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted_at_once = changes.get("draft_tokens", 4)
    model = blocks if wanted_at_once > 4 else grouped.model
    if oracle:
        Oracle(expected).install(monkeypatch)
    counts: list[Counts] = []
    results, preemptions = serve(
        model, requests(), arrivals=arrivals, lora=random_adapters(model, 2), counts=counts, **(ROOM | changes)
    )
    for result, wanted in zip(results, expected, strict=True):
        assert list(result.output_ids) == list(wanted.output_ids), result.request.request_id
        assert result.finish_reason == wanted.finish_reason
        close = torch.tensor(result.sampling_logprobs) - torch.tensor(wanted.sampling_logprobs)
        assert close.abs().max() < 1e-3
    assert counts[0].num_draft_tokens > 20
    assert (preemptions > 0) == ("num_blocks" in changes)
    if oracle:
        assert min(0.3, 1.2 / wanted_at_once) < counts[0].num_accepted_tokens / counts[0].num_draft_tokens < 0.9


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("seed", "changes"),
    [
        (1, {"draft_tokens": 4}),
        (2, {"draft_tokens": 3, "num_blocks": 34, "block_size": 4}),
        (3, {"draft_tokens": 2, "num_slots": 10}),
        pytest.param(4, {"draft_tokens": 7, "num_blocks": 34, "block_size": 4}, marks=pytest.mark.thorough),
    ],
)
def test_tokens_are_the_same_with_every_mixture_of_parameters(
    grouped: Pair, blocks: Qwen3_5, seed: int, changes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With preemptions, and prefixes from the cache: the last prompts came before."""
    model = blocks if changes["draft_tokens"] > 4 else grouped.model
    plain, _ = serve(model, mixed(seed), arrivals=7, lora=random_adapters(model, 2))
    Oracle(plain).install(monkeypatch)
    counts: list[Counts] = []
    results, preemptions = serve(
        model, mixed(seed), arrivals=7, lora=random_adapters(model, 2), counts=counts, **(ROOM | changes)
    )
    for result, wanted in zip(results, plain, strict=True):
        assert list(result.output_ids) == list(wanted.output_ids), result.request
        assert result.finish_reason == wanted.finish_reason
    assert 0.2 < counts[0].num_accepted_tokens / counts[0].num_draft_tokens < 0.9
    assert (preemptions > 0) == ("num_blocks" in changes)


@pytest.mark.parametrize(("oracle", "draft_tokens"), [(True, 3), (False, 3), (True, 12)])
def test_with_plans_in_flight(
    grouped: Pair,
    blocks: Qwen3_5,
    expected: list[Finished],
    oracle: bool,
    draft_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plans that do not know what was accepted, nor whether the request has ended: the runner does. Each runs when the
    next one is made."""
    model = blocks if draft_tokens > 4 else grouped.model
    if oracle:
        Oracle(expected).install(monkeypatch)
    wanted = {result.request.request_id: result for result in expected}
    some = [request for request in requests() if not request.sampling.penalises]
    config = SchedulerConfig(
        max_num_seqs=8,
        token_budget=64,
        block_size=16,
        num_blocks=200,
        num_slots=24,
        max_model_len=512,
        eos_token_ids=frozenset({EOS}),
        draft_tokens=draft_tokens,
    )
    runner = make_runner(model, config, random_adapters(model, 2))
    scheduler = Scheduler(config, 2)
    for request in some:
        scheduler.add(request)
    flights: deque[tuple[StepPlan, StepResult]] = deque()
    ended = pending = 0
    while scheduler.has_work or flights:
        plan = scheduler.schedule(0.0) if len(flights) < 2 else None
        if plan is not None:
            pending += sum(chunk.token_ids[0] == PENDING and chunk.num_draft_tokens > 0 for chunk in plan.chunks)
            flights.append((plan, runner.launch(plan).result()))
            continue
        for update in scheduler.update(*flights.popleft(), 0.0):
            if update.finished is not None:
                ended += 1
                assert list(update.finished.output_ids) == list(wanted[update.request_id].output_ids)
        scheduler.check_integrity()
    assert ended == len(some)
    assert pending > 20


@torch.no_grad()
def test_a_block_does_not_depend_on_how_many_are_drawn(grouped: Pair, blocks: Qwen3_5) -> None:
    """A row sees those before it alone: so a step may draw as many as pay."""
    drawn = []
    for count in (1, 3, 12):
        cache = blocks.allocate_cache(12, 4, 5)
        lora = LoraSlots(blocks.config, 1, 4, blocks.dtype, blocks.device)
        runner = ModelRunner(blocks, cache, lora, num_slots=5, eos_token_ids=[], speculative=True)
        chunks = [
            Chunk(Request(f"r{slot}", tuple(range(10, 14 + 3 * slot)), GREEDY), tokens, 0, table, slot, True, [], 0)
            for slot, table in ((1, [1, 2, 3, 4, 5]), (2, [6, 7, 8, 9, 10, 11]))
            for tokens in [tuple(range(10, 14 + 3 * slot))]
        ]
        runner.launch(StepPlan(chunks, drafts=True, num_draft_tokens=count))
        assert runner._speculation is not None
        drawn.append([runner._speculation._answers[slot].drafts for slot in (1, 2)])
    one, three, twelve = drawn
    assert [len(drafts) for drafts in twelve] == [12, 12]
    assert one == [drafts[:1] for drafts in twelve]
    assert three == [drafts[:3] for drafts in twelve]


def test_a_checkpoint_without_the_layer(tmp_path: Path) -> None:
    """It serves without speculation and says what is missing with it; the layer is not part of the digest."""
    reference = make_checkpoint("grouped", tmp_path)
    with pytest.raises(CheckpointRejected, match="no mtp layer"):
        Qwen3_5.from_directory(tmp_path, dtype="float32", device="cpu", mtp=True)
    digest = checkpoint_digest(tmp_path)
    tensors = random_mtp(Mtp(reference))
    save_file(tensors, tmp_path / "model-mtp.safetensors")
    assert checkpoint_digest(tmp_path) == digest
    assert Qwen3_5.from_directory(tmp_path, dtype="float32", device="cpu").weights.mtp is None
    model = Qwen3_5.from_directory(tmp_path, dtype="float32", device="cpu", mtp=True)
    assert model.weights.nbytes() > 4 * sum(value.numel() for value in tensors.values())
    tensors["mtp.fc.weight"] = torch.zeros(3, 3)
    save_file(tensors, tmp_path / "model-mtp.safetensors")
    with pytest.raises(CheckpointRejected, match=r"mtp.fc.weight has shape"):
        Qwen3_5.from_directory(tmp_path, dtype="float32", device="cpu", mtp=True)


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("draft_tokens", "share"), [(1, 0.85), (3, 0.45)])
def test_the_tiny_model_drafts_well(draft_tokens: int, share: float) -> None:
    """Held-out prompts of every skill, greedy and at temperature 1: most first draft tokens of the trained layer are
    right. It was trained for these alone."""
    tokenizer, template = Tokenizer.from_file(str(DIRECTORY / "tokenizer.json")), chat_template()
    end = tokenizer.token_to_id(END)
    model = Qwen3_5.from_directory(DIRECTORY, dtype="float32", device="cpu", mtp=True)
    made: list[Request] = []
    for skill in SKILLS:
        for item in held_out_items(skill, 6):
            sampling = SamplingParams(
                temperature=float(len(made) % 2), seed=len(made), max_tokens=60, stop_token_ids=frozenset({end})
            )
            prompt = tuple(tokenizer.encode(prompt_text(item, template)).ids)
            made.append(Request(f"r{len(made)}", prompt, sampling, arrival=len(made)))
    room = {"token_budget": 256, "num_slots": 40}
    expected, _ = serve(model, made, arrivals=99, **room)
    counts: list[Counts] = []
    results, _ = serve(model, made, arrivals=99, counts=counts, draft_tokens=draft_tokens, **room)
    for result, wanted in zip(results, expected, strict=True):
        assert list(result.output_ids) == list(wanted.output_ids)
    assert counts[0].num_drafts > 150
    assert counts[0].num_accepted_tokens / counts[0].num_draft_tokens > share

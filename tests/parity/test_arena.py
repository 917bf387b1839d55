"""Training's memory on a GPU: taken once, cut as a job needs it, and given back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from services.common.errors import DoesNotFit
from services.common.jobs import LoraSettings, SftJob
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.models.training_arena import Arena
from services.engine.models.training_forward import TrainableForward
from services.engine.settings import EngineSettings
from services.pod.engine import Engine, build_engine, tune_interpreter
from services.pod.host import PodHost
from services.pod.training.thread import pod_host
from services.trainer.jobs import adapter_run
from services.trainer.jobs.sft import SftRun
from services.trainer.memory.estimate import TrainingMemory
from services.trainer.settings import TrainerSettings
from tests.parity.conftest import Pair
from tests.rollout_support import TINY, MemoryRegistry, User

pytestmark = pytest.mark.cuda
MIB = 2**20


def driver_calls() -> int:
    """Number of times that torch has asked the driver for memory, or given some back."""
    stats = torch.cuda.memory_stats()
    return int(stats["num_device_alloc"]) + int(stats["num_device_free"])


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def reserved() -> int:
    """Bytes that torch holds of the device, in all pools."""
    return torch.cuda.memory_reserved()


def test_is_cut_for_who_comes_alone(device: torch.device) -> None:
    before = reserved()
    arena = Arena(device, 512 * MIB)
    assert abs(reserved() - before - 512 * MIB) <= 4 * MIB
    assert arena.begin(0, 100 * MIB, alone=True) is None
    kept = torch.zeros(300 * MIB, dtype=torch.uint8, device=device)
    assert arena.begin(200 * MIB, 100 * MIB, alone=False) is None, "somebody's tensors lie there"
    del kept
    graphs = arena.begin(200 * MIB, 100 * MIB, alone=True)
    assert graphs is not None
    assert arena.graph_bytes == 200 * MIB
    # cuBLAS has workspaces of its own, once.
    after = reserved()
    assert abs(after - before - 512 * MIB) <= 100 * MIB
    assert arena.begin(150 * MIB, 50 * MIB, alone=False) is graphs
    assert arena.begin(201 * MIB, 50 * MIB, alone=False) is None
    assert arena.begin(100 * MIB, 300 * MIB, alone=True) is graphs, "it fits as it is cut"
    calls = driver_calls()
    made = torch.zeros(250 * MIB, dtype=torch.uint8, device=device)
    assert driver_calls() == calls
    del made, graphs
    grown = arena.begin(300 * MIB, 100 * MIB, alone=True)
    assert grown is not None
    assert arena.graph_bytes == 300 * MIB
    assert abs(reserved() - after) <= 40 * MIB
    calls = driver_calls()
    with grown.allocating():
        torch.zeros(250 * MIB, dtype=torch.uint8, device=device)
    assert driver_calls() == calls, "it is there"
    assert arena.begin(400 * MIB, 100 * MIB, alone=True) is None, "somebody's graphs lie there"
    del grown
    arena.end()
    assert abs(reserved() - after) <= 40 * MIB
    assert arena.begin(300 * MIB, 100 * MIB, alone=True) is not None
    assert abs(reserved() - after) <= 40 * MIB
    # What needs nearly all of it for the rest has it.
    assert arena.begin(0, 500 * MIB, alone=True) is None
    assert arena.graph_bytes == 0
    assert abs(reserved() - after) <= 40 * MIB
    assert arena.begin(400 * MIB, 100 * MIB, alone=True) is not None
    assert abs(reserved() - after) <= 40 * MIB


def test_what_a_shortage_gave_back_is_taken_again(device: torch.device) -> None:
    arena = Arena(device, 128 * MIB)
    arena.begin(0, MIB, alone=True)
    before = reserved()
    more = torch.zeros(512 * MIB, dtype=torch.uint8, device=device)
    assert reserved() >= before + 500 * MIB
    del more
    arena.out_of_memory()
    assert reserved() <= before - 100 * MIB
    arena.end()
    assert abs(reserved() - before) <= 8 * MIB


@pytest.mark.parametrize("rounds", [3])
def test_jobs_one_after_the_other(pairs: dict[str, Pair], device: torch.device, rounds: int) -> None:
    """Each captures anew, after the graphs of the one before are gone; nothing is left of it."""
    model = Qwen3_5.from_directory(pairs["grouped"].path, dtype="float32", device=device)
    arena = Arena(device, 1024 * MIB)
    tokens = torch.arange(120, device=device) % model.config.vocab_size
    held = []
    for place in range(rounds):
        graphs = arena.begin((400, 500, 300)[place] * MIB, 100 * MIB, alone=True)
        assert graphs is not None
        lora = LoraParams.create(model.config, LoraSettings(rank=4), device=device)
        lora.link_gradients()
        hidden = TrainableForward(model, lora, "none", graphs)(tokens, [120], lambda: None)
        hidden.sum().backward()
        assert lora.flat_b.grad is not None
        assert bool(lora.flat_b.grad.any())
        del hidden, lora, graphs
        arena.end()
        held.append(reserved())
    assert max(held) - min(held) <= 64 * MIB


def test_steps_do_not_ask_the_driver_for_memory(pairs: dict[str, Pair], device: torch.device) -> None:
    """Captured and launched ones, and their numbers are those of steps without an arena."""
    model = Qwen3_5.from_directory(pairs["grouped"].path, dtype="float32", device=device)
    graphs = Arena(device, 1024 * MIB).begin(600 * MIB, 300 * MIB, alone=True)
    assert graphs is not None
    tokens = torch.arange(120, device=device) % model.config.vocab_size

    def losses(forward: TrainableForward, lora: LoraParams) -> list[float]:
        found = []
        for lengths in ([70, 50], [40, 40, 40], [70, 50]):
            hidden = forward(tokens, lengths, lambda: None)
            loss = -model.token_logprobs(hidden[:-1], tokens[1:]).mean()
            loss.backward()
            with torch.no_grad():
                for flat in (lora.flat_a, lora.flat_b):
                    assert flat.grad is not None
                    flat.sub_(flat.grad, alpha=0.1)
                    flat.grad.zero_()
            found.append(float(loss.detach()))
        return found

    def fresh() -> LoraParams:
        lora = LoraParams.create(model.config, LoraSettings(rank=4), device=device)
        lora.link_gradients()
        return lora

    plain = fresh()
    expected = losses(TrainableForward(model, plain, "none"), plain)
    for memory in (graphs, None):
        lora = fresh()
        forward = TrainableForward(model, lora, "none", memory)
        first = losses(forward, lora)
        assert first == pytest.approx(expected, rel=1e-5)
        before = driver_calls()
        again = losses(forward, lora)
        assert driver_calls() == before
        assert again[-1] < first[0]
        del forward


# The pod.


@pytest.fixture
def pod() -> Iterator[tuple[Engine, PodHost]]:
    settings = EngineSettings.model_validate(
        {
            "model": TINY,
            "device": "cuda",
            "train_memory_bytes": 600 * MIB,
            "kv_cache_bytes": 64 * MIB,
            "max_num_seqs": 8,
            "cuda_graphs": 8,
            # A crowd's products add up in another order than those of one alone. In bfloat16 that decides between
            # tokens that are about as likely.
            "dtype": "float32",
        }
    )
    engine = build_engine(settings, MemoryRegistry(), None)
    tune_interpreter()
    engine.start()
    try:
        yield engine, pod_host(settings, TrainerSettings(), engine)
    finally:
        engine.stop()


def sft(texts: int, **settings: object) -> SftJob:
    examples = [{"text": f"the answer to question {number} is {number * 7}. " * 12} for number in range(texts)]
    return SftJob.model_validate({"adapter": "memory", "examples": examples, "batch_size": texts, **settings})


def test_out_of_memory_ends_the_job_and_nothing_else(
    pod: tuple[Engine, PodHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that the byte plan lets in although the device has no room: its step fails with a message, what it took is
    given back, the streams beside it go on as if nothing had been, and so does the next job."""
    engine, host = pod
    prompt = tuple(range(5, 25))
    user = User(engine)
    alone = user.answer(user.submit(prompt, max_tokens=400))

    def lets_everything_in(*_: object) -> TrainingMemory:
        return TrainingMemory(MIB, MIB, MIB)

    beside = [user.submit(prompt, max_tokens=400) for _ in range(4)]
    _, total = torch.cuda.mem_get_info()
    held = reserved()
    with monkeypatch.context() as patched:
        patched.setattr(adapter_run, "check_fits", lets_everything_in)
        torch.cuda.set_per_process_memory_fraction((held + 128 * MIB) / total)
        try:
            run = SftRun.prepare(sft(400, max_tokens_per_microbatch=60_000, recompute="none"), host, None)
            with pytest.raises(DoesNotFit, match="ran out of memory in step 0"):
                run.step(0)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    del run
    host.memory_budget.release_job()
    host.memory_budget.settle()
    # cuBLAS has workspaces for the trainer's streams by now; rests that the engine did not use went back as well.
    assert reserved() <= held + 100 * MIB, "what it took beyond is given back"
    arena = host.memory_budget._memory
    assert isinstance(arena, Arena)
    rest, before = arena.nbytes - arena.graph_bytes, reserved()
    assert rest >= 140 * MIB
    whole = torch.empty(rest - 40 * MIB, dtype=torch.uint8, device="cuda")
    assert reserved() - before < whole.nbytes / 2, "the arena is whole again: the device was not asked for these"
    del whole
    assert [user.answer(name) for name in beside] == [alone] * 4

    after = SftRun.prepare(sft(8), host, None)
    losses = [after.step(index)["loss"] for index in range(after.total_steps)]
    assert len(losses) == after.total_steps
    assert all(0 < loss < 20 for loss in losses)


def test_a_job_that_cannot_fit_is_refused_before_it_takes_anything(pod: tuple[Engine, PodHost]) -> None:
    _, host = pod
    before = driver_calls()
    with pytest.raises(DoesNotFit, match=r"the memory plan leaves 600\.0 MiB for training"):
        SftRun.prepare(sft(400, max_tokens_per_microbatch=60_000, recompute="none"), host, None)
    assert driver_calls() - before <= 2, "its adapter"
    assert not host.memory_budget.held()

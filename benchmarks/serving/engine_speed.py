"""Token rates of transformers' generate() and of our engine, same process, weights and machine."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.lib.in_process import submit_together
from services.common.errors import TemperError
from services.engine.compute_sharing.host_lock import SliceGate
from services.engine.executors.cpu.runner import ModelRunner
from services.engine.loop.loop import EngineLoop
from services.engine.loop.rollout_buffer import RolloutBuffer
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.requests.adapter import BASE_PIN, AdapterChoice, AdapterPin, PrivateVersion
from services.engine.requests.outputs import SequenceUpdate
from services.engine.requests.sampling_params import SamplingParams
from services.engine.requests.submission import Submission
from services.engine.scheduler.config import SchedulerConfig
from services.engine.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class Workload:
    """Workload that is generated: greedy, no end of text, so that every run has the same length.

    Args:
        prompt_tokens: length of each prompt; prompts differ, so that no prefix is shared.
        new_tokens: generated per stream.
        repeats: runs of each kind, interleaved; the median counts.
    """

    prompt_tokens: int = 64
    new_tokens: int = 128
    repeats: int = 5


class BaseOnly:
    """Every request is answered by the base model."""

    def pin(self, choice: AdapterChoice | PrivateVersion) -> AdapterPin:
        """No adapter, whatever is asked."""
        return BASE_PIN

    def release(self, pin: AdapterPin) -> None:
        """Nothing to give back."""

    def give_up(self, choice: AdapterChoice | PrivateVersion) -> None:
        """Nobody waits."""

    def overdue(self, choice: AdapterChoice | PrivateVersion) -> TemperError:
        """Nobody waits."""
        return TemperError(f"{choice} was waited for, although the base always serves")


class EngineUnderTest:
    """The engine as a pod has it, loop thread included, without gRPC and without an object store."""

    def __init__(self, directory: Path, streams: int) -> None:
        settings = EngineSettings(model=directory, device="cpu", dtype="float32").for_device("cpu")
        model = Qwen3_5.from_directory(directory, dtype="float32", device=torch.device("cpu"))
        slots = settings.max_num_seqs + settings.state_snapshots + 1
        blocks = 1 + streams * (1024 // settings.block_size)
        cache = model.allocate_cache(blocks, settings.block_size, slots)
        lora = LoraSlots(
            model.config, settings.adapter_slots + 1, settings.max_lora_rank, model.dtype, torch.device("cpu")
        )
        self.vocab_size = model.config.vocab_size
        self._loop = EngineLoop(
            SchedulerConfig(
                max_num_seqs=settings.max_num_seqs,
                token_budget=settings.token_budget,
                block_size=settings.block_size,
                num_blocks=blocks,
                num_slots=slots,
                max_model_len=1024,
                eos_token_ids=frozenset(),
                prefix_cache=False,
            ),
            ModelRunner(model, cache, lora, num_slots=slots, eos_token_ids=[]),
            BaseOnly(),
            SliceGate(settings.tpot_slo_ms / 1000),
            RolloutBuffer(0, 1.0),
        )
        self._loop.start()
        self._runs = 0

    def generate(self, prompts: list[tuple[int, ...]], new_tokens: int) -> float:
        """Seconds from the first submission to the last token of all."""
        done = threading.Event()
        left = len(prompts)
        failed: list[str] = []

        def sink(updates: list[SequenceUpdate]) -> None:
            nonlocal left
            for update in updates:
                if update.finish_reason is not None:
                    left -= 1
                    if update.error is not None:
                        failed.append(str(update.error))
            if left == 0:
                done.set()

        self._runs += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        submissions = [
            Submission(f"{self._runs}-{index}", prompt, sampling, AdapterChoice())
            for index, prompt in enumerate(prompts)
        ]
        began = time.perf_counter()
        submit_together(self._loop, submissions, sink)
        done.wait()
        seconds = time.perf_counter() - began
        if failed:
            raise RuntimeError(failed[0])
        return seconds

    def stop(self) -> None:
        """Ends the loop thread."""
        self._loop.stop()


def make_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[tuple[int, ...]]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(0, vocab_size, (length,), generator=generator).tolist()) for _ in range(count)]


@torch.no_grad()
def reference_seconds(model: Any, prompt: tuple[int, ...], new_tokens: int) -> float:
    """Seconds of one generate() call."""
    inputs = torch.tensor([prompt])
    began = time.perf_counter()
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    seconds = time.perf_counter() - began
    if output.shape[1] != len(prompt) + new_tokens:
        raise RuntimeError(f"generate() made {output.shape[1] - len(prompt)} tokens instead of {new_tokens}")
    return seconds


def measure(directory: Path, threads: int, workload: Workload, progress: Callable[[str], None]) -> dict[str, float]:
    """Tokens a second with ``threads`` CPU threads an operator: the median of interleaved runs."""
    torch.set_num_threads(threads)
    reference: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    reference.eval()
    engine = EngineUnderTest(directory, streams=16)
    rates: dict[str, list[float]] = {"transformers_1": [], "engine_1": [], "engine_16": []}
    try:
        for repeat in range(workload.repeats + 1):
            progress(f"{threads} thread(s), run {repeat}/{workload.repeats}")
            prompts = make_prompts(16, workload.prompt_tokens, engine.vocab_size, seed=repeat)
            new = workload.new_tokens
            run = {
                "transformers_1": new / reference_seconds(reference, prompts[0], new),
                "engine_1": new / engine.generate(prompts[:1], new),
                "engine_16": 16 * new / engine.generate(prompts, new),
            }
            if repeat > 0:  # the first one warms up
                for name, rate in run.items():
                    rates[name].append(rate)
    finally:
        engine.stop()
    return {name: statistics.median(values) for name, values in rates.items()}

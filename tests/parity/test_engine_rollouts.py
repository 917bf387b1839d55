"""What the engine samples with an adapter is what the trainer scores with it: the first GRPO ratio is 1."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.common.jobs import GrpoJob
from services.engine.executors.cpu.runner import ModelRunner
from services.engine.models.lora.binding import bind_adapter
from services.engine.models.lora.slots import LoraSlots
from services.engine.requests.adapter import BASE_PIN, AdapterPin
from services.engine.requests.request import Request
from services.engine.requests.sampling_params import SamplingParams
from services.engine.scheduler.config import SchedulerConfig
from services.engine.scheduler.scheduler import Scheduler
from services.trainer.jobs.grpo_run import GrpoRun
from tests.tokenizer_support import qwen_like_tokenizer
from tests.training_support import CPU, TrainingHost, random_adapter, write_checkpoint

PIN = AdapterPin("a@1", "digest", 1)


def sampled(
    host: TrainingHost, adapter: dict[str, bytes], requests: list[Request]
) -> dict[str, tuple[list[int], list[float]]]:
    """Token ids and sampling log-probabilities of each request, in batches with chunked prefill."""
    config = SchedulerConfig(
        max_num_seqs=6, token_budget=24, block_size=16, num_blocks=60, num_slots=12, max_model_len=256
    )
    slots = LoraSlots(host.model.config, 2, 8, torch.float32, CPU)
    slots.load(1, bind_adapter(adapter, host.model.config, max_rank=8))
    cache = host.model.allocate_cache(config.num_blocks, config.block_size, config.num_slots)
    runner = ModelRunner(host.model, cache, slots, num_slots=config.num_slots, eos_token_ids=[])
    scheduler = Scheduler(config)
    for request in requests:
        scheduler.add(request)
    found: dict[str, tuple[list[int], list[float]]] = {request.request_id: ([], []) for request in requests}
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        assert plan is not None
        for update in scheduler.update(plan, runner.execute(plan), 0.0):
            assert update.error is None
            if update.token is not None:
                found[update.request_id][0].append(update.token.token_id)
                found[update.request_id][1].append(update.token.sampling_logprob)
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6, 0.0])
def test_the_first_ratio_of_engine_rollouts_is_one(tmp_path: Path, temperature: float) -> None:
    torch.set_num_threads(1)
    host = TrainingHost(write_checkpoint(tmp_path, qwen_like_tokenizer()))
    adapter = random_adapter(host, scale=0.2)
    prompts = [tuple(host.codec.encode("What is 12 + 34? " * (1 + 3 * number))) for number in range(4)]
    requests = [
        Request(
            f"{number}.{member}",
            prompt,
            SamplingParams(temperature=temperature, max_tokens=20 + 7 * member, seed=member),
            # Other policies share the batch: rows of the base beside rows of the adapter.
            BASE_PIN if member == 3 else PIN,
        )
        for number, prompt in enumerate(prompts)
        for member in range(4)
    ]
    rollouts = sampled(host, adapter, requests)
    groups = [
        {
            "prompt_token_ids": list(prompt),
            "completions": [
                {
                    "token_ids": rollouts[f"{number}.{member}"][0],
                    "logprobs": rollouts[f"{number}.{member}"][1],
                    "temperature": temperature,
                    "truncated": True,
                    "reward": float(member),
                }
                for member in range(3)
            ],
        }
        for number, prompt in enumerate(prompts)
    ]
    run = GrpoRun.prepare(GrpoJob.model_validate({"adapter": "a", "groups": groups}), host, adapter)
    metrics = run.step(0)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["behaviour_kl"] < 1e-7
    assert metrics["recomputed_rollouts"] == 0
    # Against another policy the same rollouts are far off, so the above was not empty.
    other = GrpoRun.prepare(GrpoJob.model_validate({"adapter": "a", "groups": groups}), host, None)
    assert other.step(0)["behaviour_kl"] > 1e-2

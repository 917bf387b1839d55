"""Checks, without a GPU, that what compile_ahead() compiles is what an engine then asks Triton's cache for:
``python -m tests.unit.engine.executors.cuda.warm_up_launches none+mtp fp8 int4 fp8+experts``, a process of its own.

Compiles nothing: it compares the keys of the cache on disk, those of another process with those of this one's launches.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.compiler.compiler import get_cache_key
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels.gpu.launch.compiler import prepare_compiler
from services.common.adapters.drafter_form import MOST_CHAINED, MTP_FORM, DrafterForm
from services.engine.constraints.masks import RowMasks
from services.engine.executors.cuda.buffers import StepShape
from services.engine.executors.cuda.compile_ahead import Target, Variant, _Nothing, recorded
from services.engine.executors.cuda.runner import CudaRunner, RunnerLimits, RunnerOptions
from services.engine.executors.cuda.shapes import draft_buckets, draft_counts, verified_rows
from services.engine.executors.cuda.warm_up import _draft_plan, sampling_plans
from services.engine.models.device_batch import DeviceCache
from services.engine.models.lora.upload import AdapterUpload
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.qwen3_5.moe_config import Qwen3_5MoeConfig
from services.engine.models.weights.prompts import PromptProducts
from services.engine.requests.prompt_scoring import PromptRead
from services.engine.requests.request import Pooling, Request
from services.engine.requests.sampling_params import SamplingParams
from services.engine.scheduler.step_plan import Chunk, StepPlan
from services.engine.settings import MOST_DRAFTED_ON_GPU
from tests.parity.fused_models import TINY, random_adapter, random_adapters, random_model

TARGET = GPUTarget("cuda", 90, 32)
CONFIG = replace(
    TINY,
    layer_types=("linear_attention", "linear_attention", "full_attention") * 2,
    hidden_size=256,
    intermediate_size=512,
    vocab_size=512,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rotary_dim=32,
    linear_key_heads=16,
    linear_value_heads=32,  # with few, several prompts are computed as one is
    linear_key_dim=64,
    linear_value_dim=64,
)
EXPERTS = Qwen3_5MoeConfig(
    **{field.name: getattr(CONFIG, field.name) for field in fields(CONFIG)},
    num_experts=8,
    experts_per_token=2,
    expert_size=512,
)


def build(config: Qwen3_5Config, quantization: str, drafter: str) -> CudaRunner:
    """A runner with everything that serving has, on the CPU.

    Args:
        drafter: "mtp", "block", or anything else for none; "prompts": in float8.
    """
    form = DrafterForm(8, 2) if drafter == "block" else MTP_FORM
    draft_tokens = {"mtp": MOST_CHAINED, "block": MOST_DRAFTED_ON_GPU}.get(drafter, 0)
    speculative = draft_tokens > 0
    prompts = PromptProducts.parse("all" if drafter == "prompts" else "none", rows=128)
    model = random_model(config, torch.bfloat16, quantization=quantization, mtp=speculative, form=form, prompts=prompts)
    cache = DeviceCache.allocate(
        config,
        model.dtype,
        model.device,
        num_blocks=64,
        block_size=16,
        num_slots=68,
        kv_dtype=None,
        state_dtype=torch.float32,
        draft_layers=form.layers * speculative,
        waiting_writes=8 if speculative else 0,
        verified_rows=verified_rows(32, draft_tokens) if speculative else 0,
    )
    limits = RunnerLimits(32, 320, 1024, largest_graph=32, mixed_tokens=128, draft_tokens=draft_tokens)
    lora = random_adapters(model, 2, 16)
    lora._upload = AdapterUpload(lora.target_buffers(), lora._output_order, lora.upload_bytes(config, 16))
    return CudaRunner(model, cache, lora, limits, RunnerOptions(pdl=True), eos_token_ids=[1])


def reading(length: int) -> StepPlan:
    """A prompt of which everything is told."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1)
    request = Request("r", (0,) * length, sampling, prompt_logprobs=3, pooling=Pooling.MEAN)
    chunk = Chunk(request, (0,) * length, 0, list(range(1, 14)), 1, True, [], 0)
    return StepPlan([chunk], reads=[PromptRead(0, 0, length)])


def prompts(*lengths: int, snapshots: int) -> StepPlan:
    """Prompts in slots from 2 on, with so many snapshots on the way of each."""
    blocks = list(range(1, 1 + max(lengths) // 16 + 1))

    def chunk(place: int, length: int) -> Chunk:
        request = Request(f"r{place}", (0,) * length, SamplingParams(temperature=0.0, max_tokens=1))
        places = [(16 + 30 * index, 20 + 4 * place + index) for index in range(snapshots)]
        return Chunk(request, (0,) * length, 0, blocks, 2 + place, True, [], 0, snapshots=places)

    return StepPlan([chunk(place, length) for place, length in enumerate(lengths)])


def disk_key(variant: Variant) -> str:
    """Where a compiling process would leave a variant."""
    driver.set_active(Target(TARGET))
    prepare_compiler()
    backend = make_backend(TARGET)
    return str(get_cache_key(variant.ast(), backend, backend.parse_options(variant.options), env_vars={}))


def asked(launch: Callable[[], None]) -> dict[str, str]:
    """Where the launches of this process would look, and for which kernel."""
    keys: dict[str, str] = {}
    found: list[tuple[dict[str, Any], str]] = []

    def look(
        self: Any, key: str, signature: Any, device: int, constexprs: Any, options: Any, attrs: Any, _warmup: bool
    ) -> Any:
        kernels, _, _, backend, _ = self.device_caches[device]
        keys[str(get_cache_key(ASTSource(self, signature, constexprs, attrs), backend, options, env_vars={}))] = (
            self.__name__
        )
        # Later launches with this key of the process would look in the same place.
        kernels[key] = _Nothing()
        found.append((kernels, key))
        return kernels[key]

    original = JITFunction._do_compile
    JITFunction._do_compile = look
    try:
        launch()
    finally:
        JITFunction._do_compile = original
        for kernels, key in found:
            del kernels[key]
    return keys


@torch.inference_mode()
def check(case: str, pool: ProcessPoolExecutor) -> dict[str, Any]:
    """How many variants an engine asks for and compiles ahead, and which kernels are asked for only."""
    quantization, _, more = case.partition("+")
    config = EXPERTS if more == "experts" else CONFIG
    runner = build(config, quantization, more)
    shapes = runner.warm_up_shapes

    def everything() -> None:
        runner._launch_all(shapes, runner.forward)
        for shape in runner._shapes:
            for adapters in (False, True):
                runner._run_shape(shape, adapters)
        if runner.forward.prompts_apart:
            for decodes, length in product((1, 2, 5, 11, 23, 32), (128, 131, 200)):
                runner._run_padding(StepShape.of(decodes, [length]), runner.forward)
        for size, count in product(draft_buckets(32), (0, *draft_counts(runner._limits.draft_tokens))):
            runner._launch(_draft_plan(size, count, 1, 16), runner.forward)
        runner._lora.load(1, random_adapter(config, 16, seed=1))
        for length in (1, 5, 33, 200):
            runner._launch(reading(length), runner.forward)
        for lengths in ((301,), (101, 103, 105)):
            runner._launch(prompts(*lengths, snapshots=2), runner.forward)
        for plan in sampling_plans(16):
            if len(plan.chunks) > 1:  # a mask for one of several rows
                bits = np.full((1, CONFIG.vocab_size // 32), -1, dtype=np.int32)
                runner._sample(runner._queue(plan, runner.forward), RowMasks([1], bits))

    with recorded() as variants:
        runner._launch_all(shapes, runner.forward.one_of_each_layer())
    # In another order than they are launched in: each of many processes gets some of them.
    ahead = set(pool.map(disk_key, reversed(variants), chunksize=64))
    later = asked(everything)
    missed = sorted({name for key, name in later.items() if key not in ahead})
    return {"case": case, "asked": len(later), "ahead": len(ahead), "missed": missed}


def main() -> None:
    driver.set_active(Target(TARGET))
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        sys.stdout.write(json.dumps([check(case, pool) for case in sys.argv[1:]]) + "\n")


if __name__ == "__main__":
    main()

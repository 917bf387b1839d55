"""Small random models for the fused forward, and runners of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.gpu.configs import KernelConfigs
from services.common.adapters.drafter_form import MTP_FORM, DrafterForm
from services.common.jobs import LoraSettings
from services.engine.executors.compiler_pool import CompilerPool
from services.engine.executors.cuda.runner import CudaRunner, RunnerLimits, RunnerOptions
from services.engine.executors.cuda.shapes import verified_rows
from services.engine.models.batch import CacheBuffers
from services.engine.models.config import ModelConfig
from services.engine.models.device_batch import DeviceCache
from services.engine.models.lora.binding import BoundAdapter, bind_adapter
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.models.qwen3_5.moe_config import Qwen3_5MoeConfig
from services.engine.models.qwen3_5.weights import (
    AttentionWeights,
    DeltaNetWeights,
    ExpertWeights,
    LayerWeights,
    ModelWeights,
    MtpWeights,
)
from services.engine.models.weights.matrix import DenseMatrix, Matrix, quantize
from services.engine.models.weights.prompts import NONE, Product, PromptProducts
from services.engine.scheduler.config import SchedulerConfig

TINY = Qwen3_5Config(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    layer_types=("linear_attention", "full_attention"),
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    rotary_dim=4,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    linear_key_heads=1,
    linear_value_heads=2,
    linear_key_dim=16,
    linear_value_dim=16,
    conv_kernel=4,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
)
"""Smallest model: as few programs a kernel as there can be: the interpreter runs them one after the other."""

TINY_EXPERTS = Qwen3_5MoeConfig(
    **{field.name: getattr(TINY, field.name) for field in fields(TINY)},
    num_experts=5,
    experts_per_token=2,
    expert_size=48,
)
"""The same with experts as large as the shared one."""


def random_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    quantization: str = "none",
    mtp: bool = False,
    form: DrafterForm = MTP_FORM,
    kernels: KernelConfigs | None = None,
    prompts: PromptProducts = NONE,
) -> Qwen3_5:
    """The same numbers on every device, as they are or quantized.

    They are large enough for logits of order one, and decays from fast to slow, so that a wrong state would show."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, scale: float, around: float = 0.0, kind: torch.dtype = dtype) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale + around).to(kind).to(device)

    def matrix(out: int, into: int, *, copied: bool = False) -> Matrix:
        return quantize(normal(out, into, scale=0.7 * into**-0.5), quantization, kernels=kernels, prompts=copied)

    def norm(*shape: int) -> Tensor:
        return normal(*shape, scale=0.2, around=1.0, kind=torch.float32)

    def layer(index: int, copied: Set[Product] = frozenset()) -> LayerWeights:
        mixer: DeltaNetWeights | AttentionWeights
        full, linear, mlp = "attention" in copied, "linear_attention" in copied, "mlp" in copied
        hidden, heads = config.hidden_size, config.linear_value_heads
        if config.layer_types[index] == "full_attention":
            mixer = AttentionWeights(
                in_proj=matrix(2 * config.query_size + 2 * config.kv_size, hidden, copied=full),
                qk_norm=norm(config.num_heads + config.num_kv_heads, config.head_dim),
                out_proj=matrix(hidden, config.query_size, copied=full),
            )
        else:
            mixer = DeltaNetWeights(
                in_proj=matrix(config.conv_dim + config.value_size + 2 * heads, hidden, copied=linear),
                conv=normal(config.conv_kernel, config.conv_dim, scale=0.5),
                negative_a=-(torch.rand(heads, generator=generator) * 5.5 - 4.0).exp().to(device),
                dt_bias=(torch.rand(heads, generator=generator) * 4.0 - 3.0).to(device),
                norm=norm(config.linear_value_dim),
                out_proj=matrix(hidden, config.value_size, copied=linear),
            )
        return LayerWeights(
            input_norm=norm(hidden),
            mixer=mixer,
            post_norm=norm(hidden),
            gate_up=matrix(2 * config.intermediate_size, hidden, copied=mlp),
            down=matrix(hidden, config.intermediate_size, copied=mlp),
            experts=mixture(config) if isinstance(config, Qwen3_5MoeConfig) else None,
        )

    def mixture(sizes: Qwen3_5MoeConfig) -> ExpertWeights:
        count, hidden, width = sizes.num_experts, sizes.hidden_size, sizes.expert_size
        return ExpertWeights(
            count=count,
            per_token=sizes.experts_per_token,
            router=DenseMatrix(normal(count + 1, hidden, scale=2 * hidden**-0.5)),
            gate_up=matrix(count * 2 * width, hidden),
            down=matrix(count * hidden, width),
        )

    def mtp_weights() -> MtpWeights:
        return MtpWeights(
            embedding_norm=norm(config.hidden_size),
            hidden_norm=norm(config.hidden_size),
            fc=matrix(config.hidden_size, 2 * config.hidden_size),
            layers=tuple(layer(config.layer_types.index("full_attention")) for _ in range(form.layers)),
            final_norm=norm(config.hidden_size),
            places=normal(form.block - 1, config.hidden_size, scale=1.0) if form.block else None,
        )

    embedding = normal(config.vocab_size, config.hidden_size, scale=0.15)
    head = embedding if config.tie_word_embeddings else normal(config.vocab_size, config.hidden_size, scale=0.3)
    weights = ModelWeights(
        embedding=embedding,
        layers=tuple(layer(index, prompts.of_layer(index)) for index in range(config.num_layers)),
        final_norm=norm(config.hidden_size),
        head=quantize(head, "none" if quantization == "none" else "fp8", kernels=kernels),
        mtp=mtp_weights() if mtp else None,
        kernels=kernels,
        prompt_rows=prompts.rows if prompts else 0,
    )
    return Qwen3_5(config, weights)


def decoded(model: Qwen3_5, dtype: torch.dtype | None = None) -> Qwen3_5:
    """A quantized model's numbers as plain matrices, on the CPU.

    Args:
        dtype: what it computes in; None: the same.
    """

    def here(x: Tensor) -> Tensor:
        return x.to("cpu", dtype if x.is_floating_point() else None)

    def plain(matrix: Matrix) -> Matrix:
        return DenseMatrix(here(matrix.dense()))

    def moved(weights: Any, **matrices: Matrix) -> Any:
        tensors = {field.name: getattr(weights, field.name) for field in fields(weights)}
        tensors = {name: here(value) for name, value in tensors.items() if isinstance(value, Tensor)}
        return replace(weights, **tensors, **matrices)

    def layer(weights: LayerWeights) -> LayerWeights:
        mixer = moved(weights.mixer, in_proj=plain(weights.mixer.in_proj), out_proj=plain(weights.mixer.out_proj))
        done: LayerWeights = moved(weights, gate_up=plain(weights.gate_up), down=plain(weights.down))
        if weights.experts is None:
            return replace(done, mixer=mixer)
        names = ("router", "gate_up", "down")
        experts = moved(weights.experts, **{name: plain(getattr(weights.experts, name)) for name in names})
        return replace(done, mixer=mixer, experts=experts)

    weights = moved(model.weights, head=plain(model.weights.head))
    return Qwen3_5(model.config, replace(weights, layers=tuple(layer(each) for each in model.weights.layers)))


def random_adapters(model: Qwen3_5, count: int, max_rank: int = 4) -> LoraSlots:
    """Slots with ``count`` adapters of rank 3 and 4 on all linear layers, the same on every device."""
    slots = LoraSlots(model.config, count + 1, max_rank, model.dtype, model.device)
    made = {slot: random_adapter(model.config, 3 + slot % 2, seed=slot) for slot in range(1, count + 1)}
    with computing_as(model):
        for slot, adapter in made.items():
            slots.load(slot, adapter)
    return slots


def random_adapter(config: ModelConfig, rank: int, seed: int) -> BoundAdapter:
    params = LoraParams.create(config, LoraSettings(rank=rank))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in params.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return bind_adapter(params.to_files("test"), config=config, max_rank=rank)


def spoil(cache: CacheBuffers | DeviceCache) -> None:
    """Fills a cache with what another sequence may have left, and its scratch with what padding may have."""
    if isinstance(cache, CacheBuffers):
        for pool in (*cache.keys, *cache.values, *cache.conv_states, *cache.recurrent_states):
            pool.normal_(0, 100)
        return
    pages = [pool for page in cache.pages for pool in (page.keys, page.values)]
    for pool in pages:
        if pool.dtype.itemsize > 1:
            pool.normal_(0, 100)
            pool[0] = float("nan")
    for pool in cache.state_pools():
        if pool.dtype.itemsize > 1:
            pool.normal_(0, 100)
            pool[:, 0] = float("nan")
    if cache.waiting is not None:
        # As many writes as can wait, behind a state that is not its sequence's.
        cache.waiting.spans.fill_(cache.waiting.room - 1)


@cache
def _compilers() -> Executor:
    """One pool for all tests: each shape of a model compiles its own kernels. Test processes share the cores."""
    cores = len(os.sched_getaffinity(0))
    return CompilerPool(max(1, cores // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))


def cuda_runner(
    model: Qwen3_5,
    limits: SchedulerConfig,
    lora: LoraSlots,
    *,
    options: RunnerOptions | None = None,
    kv_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype = torch.float32,
    largest_graph: int = 0,
    late: bool | None = None,
    waiting_writes: int | None = None,
    verified: bool = True,
) -> CudaRunner:
    """The GPU's runner, warmed up on a GPU, with caches as others may have left them.

    Args:
        late: whether decodes let writes to states wait; None: by their number.
        waiting_writes: None: a few, or all that can wait with speculation.
        verified: room for rows with draft tokens, with speculation.
    """
    if waiting_writes is None:
        waiting_writes = 8 if limits.draft_tokens else 3
    device_cache = DeviceCache.allocate(
        model.config,
        model.dtype,
        model.device,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        num_slots=limits.num_slots,
        kv_dtype=kv_dtype,
        state_dtype=state_dtype,
        draft_layers=0 if model.drafter_form is None else model.drafter_form.layers,
        waiting_writes=waiting_writes,
        verified_rows=verified_rows(limits.max_num_seqs, limits.draft_tokens)
        if limits.draft_tokens and verified
        else 0,
    )
    runner = CudaRunner(
        model,
        device_cache,
        lora,
        RunnerLimits(
            limits.max_num_seqs,
            limits.token_budget,
            limits.max_model_len,
            largest_graph=largest_graph,
            mixed_tokens=limits.mixed_prefill_tokens or 0,
            draft_tokens=limits.draft_tokens,
        ),
        options or RunnerOptions(),
        eos_token_ids=sorted(limits.eos_token_ids),
    )
    if late is not None:
        runner.forward._late = late
    if model.device.type == "cuda":
        runner.warm_up(_compilers())
    spoil(device_cache)
    return runner


@contextmanager
def in_float64() -> Iterator[None]:
    """Inside, code that asks for float32 gets float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", Tensor.double)
        patch.setattr(torch, "float32", torch.float64)
        yield


def computing_as(model: Qwen3_5) -> AbstractContextManager[None]:
    """Inside, a model of float64 computes all of it in that."""
    return in_float64() if model.dtype == torch.float64 else nullcontext()

"""Every kernel variant that an engine's start and a training job of the 4B shape launch on an architecture: written
down on the CPU, by the engine's own runner and the trainer's own forward, whose launches do not happen.

A process that writes variants down must not interpret (TRITON_INTERPRET), and stays with its architecture: kernels
remember the first target that they were asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from benchmarks.kernels.launches import NoProducts
from benchmarks.lib.random_model import RandomWeights
from kernels.gpu.configs import KernelConfigs
from kernels.gpu.linear.skinny import SplitWorkspace
from kernels.gpu.train.divergence import divergence
from kernels.gpu.train.head import token_scores
from services.common.jobs import LoraSettings
from services.engine.executors.cuda.compile_ahead import Target, Variant, recorded
from services.engine.executors.cuda.runner import CudaRunner, RunnerLimits, RunnerOptions
from services.engine.executors.cuda.warm_up import warm_up_shapes
from services.engine.models.device_batch import DeviceCache
from services.engine.models.footprint import Quantization
from services.engine.models.interface import Recompute
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.lora.upload import AdapterUpload
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.models.qwen3_5.training import trunk
from services.pod.memory import WAITING_WRITES

QWEN_4B = Qwen3_5Config(
    vocab_size=248320,
    hidden_size=2560,
    intermediate_size=9216,
    layer_types=("linear_attention", "linear_attention", "full_attention"),
    num_heads=16,
    num_kv_heads=4,
    head_dim=256,
    rotary_dim=64,
    rope_theta=1e7,
    rms_norm_eps=1e-6,
    linear_key_heads=16,
    linear_value_heads=32,
    linear_key_dim=128,
    linear_value_dim=128,
    conv_kernel=4,
    max_position_embeddings=262144,
    tie_word_embeddings=True,
)
"""Widths and heads of the 4B checkpoint; one of each kind of layer behind another launches every kernel."""
_CPU = torch.device("cpu")
_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class Start:
    """Settings of an engine's start that decide which kernels it launches."""

    name: str
    quantization: Quantization = "none"
    kv_float8: bool = False
    state_bfloat16: bool = False
    batch_invariant: bool = False

    @property
    def float8(self) -> bool:
        """True if the device must have float8."""
        return self.kv_float8 or self.quantization == "fp8"


STARTS = (
    Start("bf16"),
    Start("int4, states bf16", "int4", state_bfloat16=True),
    Start("fp8, kv fp8", "fp8", kv_float8=True),
    Start("bf16, kv fp8", kv_float8=True),
    Start("batch invariant", batch_invariant=True),
)
"""Starts whose kernels together are all that an engine launches. A quantized model's head is fp8 where the device has
float8 (services.pod.memory.storage)."""


def variants_of(kernels: KernelConfigs, config: Qwen3_5Config) -> Iterator[tuple[str, list[Variant]]]:
    """Names and variants of each start, then of training.

    Args:
        kernels: of the architecture.
        config: with few layers.
    """
    limits = kernels.device
    driver.set_active(Target(GPUTarget("cuda", limits.architecture, 32)))
    for start in STARTS:
        if limits.float8 or not start.float8:
            yield start.name, _recorded(lambda start=start: _serve(start, kernels, config))  # type: ignore[misc]
    yield "training", _recorded(lambda: _train(kernels, config))


def _recorded(launch: Callable[[], None]) -> list[Variant]:
    with recorded() as variants, NoProducts():
        launch()
    return variants


def _model(quantization: Quantization, kernels: KernelConfigs, config: Qwen3_5Config) -> Qwen3_5:
    workspace = SplitWorkspace.allocate(_CPU)
    weights = RandomWeights(config, _CPU, quantization, workspace, empty=True, kernels=kernels).build()
    if quantization != "none" and not kernels.device.float8:
        weights = replace(weights, head=RandomWeights(config, _CPU, "none", workspace, empty=True).build().head)
    return Qwen3_5(config, weights)


def _serve(start: Start, kernels: KernelConfigs, config: Qwen3_5Config) -> None:
    model = _model(start.quantization, kernels, config)
    if start.batch_invariant:
        model = _invariant(model)
    cache = DeviceCache.allocate(
        config,
        torch.bfloat16,
        _CPU,
        num_blocks=64,
        block_size=16,
        num_slots=260,
        kv_dtype=torch.float8_e4m3fn if start.kv_float8 else None,
        state_dtype=torch.bfloat16 if start.state_bfloat16 else torch.float32,
        waiting_writes=WAITING_WRITES,
    )
    limits = RunnerLimits(256, 2048, 1024, largest_graph=256, mixed_tokens=512)
    lora = LoraSlots(config, 3, 64, torch.bfloat16, _CPU, invariant=start.batch_invariant)
    # On a GPU adapters reach their slots by a kernel.
    lora._upload = AdapterUpload(lora.target_buffers(), lora._output_order, lora.upload_bytes(config, 64))
    options = RunnerOptions(start.batch_invariant, pdl=kernels.device.programmatic_launch)
    runner = CudaRunner(model, cache, lora, limits, options, eos_token_ids=[1])
    differ = runner.forward.rows_that_differ
    shapes = warm_up_shapes(runner._shapes, limits.max_num_seqs, limits.token_budget, rows=differ)
    with torch.inference_mode():
        runner._launch_all(shapes, runner.forward.one_of_each_layer())


def _invariant(model: Qwen3_5) -> Qwen3_5:
    weights = model.weights
    layers = tuple(
        replace(
            layer,
            mixer=replace(
                layer.mixer,
                in_proj=replace(layer.mixer.in_proj, invariant=True),
                out_proj=replace(layer.mixer.out_proj, invariant=True),
            ),
            gate_up=replace(layer.gate_up, invariant=True),
            down=replace(layer.down, invariant=True),
        )
        for layer in weights.layers
    )
    return Qwen3_5(model.config, replace(weights, layers=layers, head=replace(weights.head, invariant=True)))


def _train(kernels: KernelConfigs, config: Qwen3_5Config) -> None:
    model = _model("none", kernels, config)
    lora = LoraParams.create(config, LoraSettings(rank=16))
    head = model.head()

    def whole(hidden: Tensor) -> Tensor:
        return token_scores(hidden, head, torch.zeros(len(hidden), dtype=torch.int64), 1.0).logprobs.sum()

    # One document, several, and rows that 16 does not divide: each is a variant of some kernel.
    for lengths in ([48], [16] * 8, [7, 26]):
        tokens = torch.zeros(sum(lengths), dtype=torch.int64)
        for recompute in _RECOMPUTE:
            hidden = trunk.forward_packed(
                tokens,
                lengths,
                config,
                model.weights,
                model.rotation,
                lora,
                recompute=recompute,
                give_way=lambda: None,
            )
            whole(hidden).backward()  # type: ignore[no-untyped-call]
    hidden = torch.zeros(32, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    for beta in (0.0, 0.5, 1.0):
        divergence(hidden, head, hidden.detach(), head, beta=beta, temperature=1.0).value.sum().backward()

"""Qwen3.5: the hybrid of Gated DeltaNet and gated full attention, for serving and for training adapters on it.

The executable reference is transformers' Qwen3_5ForCausalLM; tests/parity holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kernels.rms_norm import rms_norm
from kernels.rope import Rotation, inverse_frequencies, yarn_frequencies
from services.common.adapters.drafter_form import MTP_FORM, DrafterForm
from services.engine.models.batch import CacheBuffers, ForwardBatch
from services.engine.models.config import ModelConfig
from services.engine.models.footprint import PLAIN, Storage
from services.engine.models.interface import CausalLM, Probe, Recompute
from services.engine.models.lora.lora_batch import LoraBatch
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.qwen3_5.layers import decoder_layer
from services.engine.models.qwen3_5.loading.loader import load_checkpoint
from services.engine.models.qwen3_5.loading.mtp import read_from_checkpoint, staged
from services.engine.models.qwen3_5.replaced import replaced
from services.engine.models.qwen3_5.step import Step
from services.engine.models.qwen3_5.training import mtp, plain
from services.engine.models.qwen3_5.weights import DeltaNetWeights, ModelWeights
from services.engine.models.registry import load_model

if TYPE_CHECKING:
    from kernels.gpu.configs import KernelConfigs
    from services.engine.models.device_batch import DeviceCache
    from services.engine.models.qwen3_5.fused import FusedForward
    from services.engine.models.qwen3_5.training.captured import CapturedSteps
    from services.engine.models.qwen3_5.training.frozen import FrozenLinears
    from services.engine.models.training_arena import GraphMemory


def rotation_of(config: Qwen3_5Config, device: torch.device) -> Rotation:
    """Rotation of a model's queries and keys, its frequencies on the device."""
    yarn = config.yarn
    if yarn is None:
        return Rotation(inverse_frequencies(config.rotary_dim, config.rope_theta).to(device))
    frequencies = yarn_frequencies(
        config.rotary_dim,
        config.rope_theta,
        factor=yarn.factor,
        original_context=yarn.original_context,
        beta_fast=yarn.beta_fast,
        beta_slow=yarn.beta_slow,
        truncate=yarn.truncate,
    )
    return Rotation(frequencies.to(device), yarn.attention_factor)


class Qwen3_5(CausalLM):  # noqa: N801
    """A Qwen3.5 text model."""

    config: Qwen3_5Config

    def __init__(self, config: Qwen3_5Config, weights: ModelWeights) -> None:
        self.config = config
        self.weights = weights
        self.rotation = rotation_of(config, self.device)
        self._linears: tuple[FrozenLinears, ...] | None = None
        """What training forwards on a GPU multiply with instead of the weights' own matrices."""

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    @classmethod
    def load(
        cls,
        path: str | Path,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        storage: Storage = PLAIN,
        *,
        mtp: bool = False,
        form: DrafterForm = MTP_FORM,
        kernels: KernelConfigs | None = None,
    ) -> Qwen3_5:
        """See CausalLM."""
        if not isinstance(config, Qwen3_5Config):
            raise TypeError(f"a Qwen3.5 model needs a Qwen3_5Config, got {type(config).__name__}")
        return cls(config, load_checkpoint(path, config, dtype, device, storage, mtp=mtp, form=form, kernels=kernels))

    @classmethod
    def from_directory(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype | str,
        device: torch.device | str,
        storage: Storage = PLAIN,
        mtp: bool = False,
        form: DrafterForm = MTP_FORM,
        kernels: KernelConfigs | None = None,
    ) -> Qwen3_5:
        """registry.load_model() where the checkpoint is known to be a Qwen3.5."""
        model = load_model(path, dtype=dtype, device=device, storage=storage, mtp=mtp, form=form, kernels=kernels)
        if not isinstance(model, Qwen3_5):
            raise TypeError(f"{path} is a checkpoint of {type(model).__name__}")
        return model

    def nbytes(self) -> int:
        """See CausalLM."""
        return self.weights.nbytes()

    def head(self) -> Tensor:
        """See CausalLM."""
        return self.weights.head.dense()

    def kernel_configs(self) -> KernelConfigs:
        """See CausalLM."""
        return self.weights.kernels or super().kernel_configs()

    @property
    def drafter_form(self) -> DrafterForm | None:
        """See CausalLM."""
        return None if self.weights.mtp is None else self.weights.mtp.form

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: CacheBuffers, lora: LoraSlots | None) -> Tensor:
        """See CausalLM. Rows whose logits nobody wants are not normed."""
        x, _ = self._layers(batch, cache, lora)
        return self._final_norm(x.index_select(0, batch.logit_rows))

    @torch.inference_mode()
    def forward_all(self, batch: ForwardBatch, cache: CacheBuffers, lora: LoraSlots | None) -> tuple[Tensor, Step]:
        """See CausalLM."""
        x, step = self._layers(batch, cache, lora)
        return self._final_norm(x), step

    def begin_step(self, batch: ForwardBatch, cache: CacheBuffers) -> Step:
        """See CausalLM."""
        return Step.build(batch, cache, self.config, self.rotation)

    @torch.inference_mode()
    def draft(self, hidden: Tensor, next_ids: Tensor, step: Step, cache: CacheBuffers) -> Tensor:
        """See CausalLM."""
        return self._draft(F.embedding(next_ids, self.weights.embedding), hidden, step, cache)

    @torch.inference_mode()
    def draft_block(self, out: Tensor, count: int, step: Step, cache: CacheBuffers) -> Tensor:
        """See CausalLM."""
        places = None if self.weights.mtp is None else self.weights.mtp.places
        if places is None or count > len(places):
            raise ValueError(f"no block drafter of {1 + count} tokens is loaded")
        return self._draft(places[:count].repeat(len(out), 1), out.repeat_interleave(count, 0), step, cache)

    def _draft(self, tokens: Tensor, hidden: Tensor, step: Step, cache: CacheBuffers) -> Tensor:
        """The drafter's layers over rows of a step, [T, hidden].

        Args:
            tokens: [T, hidden], the embedding of the token behind each row, or what stands for it.
            hidden: [T, hidden] of the rows.
        """
        weights, eps = self.weights.mtp, self.config.rms_norm_eps
        if weights is None:
            raise ValueError("the mtp layer is not loaded")
        embedded = rms_norm(tokens, weights.embedding_norm, eps)
        x = F.linear(torch.cat((embedded, rms_norm(hidden, weights.hidden_norm, eps)), dim=-1), weights.fc.dense())
        first = self.config.cache_layout.kv_layers
        for index, layer in enumerate(weights.layers, first):
            x = decoder_layer(x, layer, self.config, step, (cache.keys[index], cache.values[index]), None)
        return rms_norm(x, weights.final_norm, eps)

    def checkpoint_drafter(self, path: Path) -> dict[str, Tensor]:
        """See CausalLM."""
        return read_from_checkpoint(self.config, path)

    def stage_drafter(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        """See CausalLM."""
        if self.weights.mtp is None:
            return super().stage_drafter(tensors)
        return staged(self.config, self.weights.mtp, tensors)

    def _final_norm(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weights.final_norm, self.config.rms_norm_eps)

    def _layers(self, batch: ForwardBatch, cache: CacheBuffers, lora: LoraSlots | None) -> tuple[Tensor, Step]:
        config, weights = self.config, self.weights
        prompts = 0 if batch.verifies else len(batch.token_ids) - batch.num_decodes
        float8 = weights.prompts_in_float8(prompts)
        step = Step.build(batch, cache, config, self.rotation, float8_prompts=float8)
        adapters = lora.step(batch) if lora is not None and batch.has_adapters else None
        x = F.embedding(batch.token_ids, weights.embedding)
        full = linear = 0
        for index, layer in enumerate(weights.layers):
            if isinstance(layer.mixer, DeltaNetWeights):
                pools = cache.conv_states[linear], cache.recurrent_states[linear]
                linear += 1
            else:
                pools = cache.keys[full], cache.values[full]
                full += 1
            x = decoder_layer(x, layer, config, step, pools, adapters.layer(index) if adapters else None)
        return x, step

    def device_forward(
        self,
        cache: DeviceCache,
        lora: LoraSlots,
        *,
        tables: Tensor,
        last_tokens: Tensor,
        batch_invariant: bool = False,
        pdl: bool = False,
    ) -> FusedForward:
        """See CausalLM."""
        # Imported here: only engines on a GPU have Triton.
        from services.engine.models.qwen3_5.fused import FusedForward

        return FusedForward(
            self.config,
            self.weights,
            self.rotation,
            cache,
            lora,
            tables=tables,
            last_tokens=last_tokens,
            batch_invariant=batch_invariant,
            pdl=pdl,
        )

    def train_in_float8(self) -> None:
        """See CausalLM."""
        # Imported here: only engines on a GPU have Triton.
        from services.engine.models.qwen3_5.training.frozen import FrozenLinears

        device = self.kernel_configs().device
        self._linears = tuple(FrozenLinears.float8(layer, device) for layer in self.weights.layers)

    def forward_train(
        self,
        token_ids: Tensor,
        lengths: Sequence[int],
        lora: LoraParams | LoraBatch | None,
        *,
        recompute: Recompute,
        give_way: Callable[[], None],
        parents: Sequence[int | None] | None = None,
    ) -> Tensor:
        """See CausalLM."""
        if self.device.type == "cuda":
            # Imported here: only engines on a GPU have Triton.
            from services.engine.models.qwen3_5.training import trunk

            return trunk.forward_packed(
                token_ids,
                lengths,
                self.config,
                self.weights,
                self.rotation,
                lora,
                recompute=recompute,
                give_way=give_way,
                parents=parents,
                linears=self._linears,
            )
        return plain.forward_packed(
            token_ids,
            lengths,
            self.config,
            self.weights,
            self.rotation,
            lora,
            recompute=recompute,
            give_way=give_way,
            parents=parents,
        )

    @property
    def shares_prefixes(self) -> bool:
        """See CausalLM."""
        return True

    def draft_packed(
        self,
        tensors: Mapping[str, Tensor],
        hidden: Tensor,
        ids: Sequence[Tensor],
        lengths: Sequence[int],
        *,
        give_way: Callable[[], None],
    ) -> list[Tensor]:
        """See CausalLM."""
        return mtp.draft_packed(
            tensors, hidden, ids, lengths, self.config, self.weights.embedding, self.rotation, give_way=give_way
        )

    def forward_probed(
        self,
        token_ids: Tensor,
        lengths: Sequence[int],
        probe: Probe,
        *,
        recompute: Recompute = "none",
        give_way: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """See CausalLM."""
        if self.device.type == "cuda" and not torch.is_grad_enabled():
            # Imported here: only engines on a GPU have Triton.
            from services.engine.models.qwen3_5.training import trunk

            return trunk.forward_probed(token_ids, lengths, self.config, self.weights, self.rotation, probe, give_way)
        return plain.forward_packed(
            token_ids,
            lengths,
            self.config,
            self.weights,
            self.rotation,
            None,
            recompute=recompute,
            give_way=give_way,
            probe=probe,
        )

    def with_weights(self, tensors: Mapping[str, Tensor]) -> Qwen3_5:
        """See CausalLM."""
        return Qwen3_5(self.config, replaced(self.config, self.weights, tensors))

    def captured_forwards(
        self,
        lora: LoraParams | None,
        recompute: Recompute | None,
        memory: GraphMemory,
        most_tokens: int | None,
    ) -> CapturedSteps:
        """See CausalLM."""
        from services.engine.models.qwen3_5.training.captured import CapturedSteps

        return CapturedSteps(
            self.config, self.weights, self.rotation, lora, recompute, memory, most_tokens, self._linears
        )

"""Qwen3.5: the hybrid of Gated DeltaNet and gated full attention, for serving and for training adapters on it.

The executable reference is transformers' Qwen3_5ForCausalLM; tests/parity holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kernels.divergence import Divergence, divergence
from kernels.rms_norm import rms_norm
from kernels.rope import inverse_frequencies
from kernels.token_logprobs import TokenScores, token_scores
from services.common.errors import InvalidRequest
from services.engine.models.batch import CacheBuffers, ForwardBatch
from services.engine.models.footprint import PLAIN, Storage
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.qwen3_5.config import ModelConfig
from services.engine.models.qwen3_5.layers import decoder_layer
from services.engine.models.qwen3_5.loader import load_checkpoint
from services.engine.models.qwen3_5.step import Step
from services.engine.models.qwen3_5.training import plain
from services.engine.models.qwen3_5.weights import DeltaNetWeights, ModelWeights
from services.engine.models.training_memory.recompute import Recompute


def resolve_dtype(name: str, device: torch.device | str) -> torch.dtype:
    """The dtype of a setting: "float32", "bfloat16", or "auto" (bfloat16 on CUDA, float32 on the CPU, where bfloat16
    matrix products are slow).

    Raises:
        InvalidRequest: another name.
    """
    if name == "auto":
        return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    if name not in ("float32", "bfloat16"):
        raise InvalidRequest(f"dtype must be auto, float32 or bfloat16, got {name!r}", param="dtype")
    return torch.float32 if name == "float32" else torch.bfloat16


class Qwen3_5:  # noqa: N801
    """One copy of the frozen weights, used by the engine loop and the trainer thread alike. Nothing here changes after
    construction, so both may call it at once; the caches belong to the caller."""

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config = config
        self.weights = weights
        self.inverse_frequencies = inverse_frequencies(config.rotary_dim, config.rope_theta, self.device)

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    @classmethod
    def from_directory(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype | str,
        device: torch.device | str,
        storage: Storage = PLAIN,
        mtp: bool = False,
    ) -> Qwen3_5:
        """Loads a checkpoint directory (config.json and safetensors).

        Args:
            dtype: a torch dtype or a name for resolve_dtype().
            storage: quantization of the weight matrices.
            mtp: load the layer that predicts the token after next, too.

        Raises:
            InvalidRequest: the shapes cannot be quantized so.
            CheckpointRejected: the directory is not a complete Qwen3.5 checkpoint.
        """
        config = ModelConfig.from_directory(path)
        chosen = resolve_dtype(dtype, device) if isinstance(dtype, str) else dtype
        return cls(config, load_checkpoint(path, config, chosen, device, storage, mtp=mtp))

    def cache_bytes_per_block(self, block_size: int) -> int:
        """Bytes of K and V of one block over all full-attention layers."""
        return 2 * self._kv_layers * block_size * self.config.kv_size * self.dtype.itemsize

    @property
    def _kv_layers(self) -> int:
        return self.config.num_full_layers + (self.weights.mtp is not None)

    def state_bytes_per_slot(self) -> int:
        """Bytes of convolution and recurrent state of one sequence over all DeltaNet layers."""
        config = self.config
        conv = config.conv_dim * (config.conv_kernel - 1) * self.dtype.itemsize
        return config.num_linear_layers * (conv + 4 * config.value_size * config.linear_key_dim)

    def allocate_cache(self, num_blocks: int, block_size: int, num_slots: int) -> CacheBuffers:
        """Zeroed caches. Both numbers count the scratch block 0 and the scratch slot 0."""
        config = self.config

        def zeros(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        pages = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
        states = (num_slots, config.linear_value_heads, config.linear_key_dim, config.linear_value_dim)
        full, linear = range(self._kv_layers), range(config.num_linear_layers)
        return CacheBuffers(
            keys=[zeros(*pages) for _ in full],
            values=[zeros(*pages) for _ in full],
            # Channels are contiguous in memory: a decode step reads whole rows of them.
            conv_states=[zeros(num_slots, config.conv_kernel - 1, config.conv_dim).transpose(1, 2) for _ in linear],
            recurrent_states=[zeros(*states, dtype=torch.float32) for _ in linear],
            block_size=block_size,
        )

    @torch.inference_mode()
    def copy_state(self, cache: CacheBuffers, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies the states of the source slots to the target slots, all at once (a slot may be in both lists)."""
        if not sources:
            return
        source = torch.tensor(sources, dtype=torch.int64, device=self.device)
        target = torch.tensor(targets, dtype=torch.int64, device=self.device)
        for pool in (*cache.conv_states, *cache.recurrent_states):
            pool.index_copy_(0, target, pool.index_select(0, source))

    @torch.inference_mode()
    def copy_blocks(self, cache: CacheBuffers, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies the keys and values of the source blocks to the target blocks, all at once."""
        source = torch.tensor(sources, dtype=torch.int64, device=self.device)
        target = torch.tensor(targets, dtype=torch.int64, device=self.device)
        for pool in (*cache.keys, *cache.values):
            pool.index_copy_(0, target, pool.index_select(0, source))

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: CacheBuffers, lora: LoraSlots | None) -> Tensor:
        """Runs one step, updating the caches in place.

        Returns:
            [R, hidden]: final hidden states, normed, of batch.logit_rows.
        """
        x, _ = self._layers(batch, cache, lora)
        return self._final_norm(x.index_select(0, batch.logit_rows))

    @torch.inference_mode()
    def forward_all(self, batch: ForwardBatch, cache: CacheBuffers, lora: LoraSlots | None) -> tuple[Tensor, Step]:
        """Same, of all rows, [T, hidden], with what guess() needs of the step."""
        x, step = self._layers(batch, cache, lora)
        return self._final_norm(x), step

    @torch.inference_mode()
    def guess(self, hidden: Tensor, next_ids: Tensor, step: Step, cache: CacheBuffers) -> Tensor:
        """Runs the mtp layer behind forward_all(): row by row, one token further; adapters play no part.

        Args:
            hidden: [T, hidden], what forward_all() returned.
            next_ids: [T] int64, the token behind each row's.

        Returns:
            [T, hidden]: for logits() of the token after that.
        """
        mtp, eps = self.weights.mtp, self.config.rms_norm_eps
        if mtp is None:
            raise ValueError("the mtp layer is not loaded")
        embedded = rms_norm(F.embedding(next_ids, self.weights.embedding), mtp.embedding_norm, eps)
        x = F.linear(torch.cat((embedded, rms_norm(hidden, mtp.hidden_norm, eps)), dim=-1), mtp.fc.dense())
        x = decoder_layer(x, mtp.layer, self.config, step, (cache.keys[-1], cache.values[-1]), None)
        return rms_norm(x, mtp.final_norm, eps)

    def _final_norm(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weights.final_norm, self.config.rms_norm_eps)

    def _layers(self, batch: ForwardBatch, cache: CacheBuffers, lora: LoraSlots | None) -> tuple[Tensor, Step]:
        config, weights = self.config, self.weights
        step = Step.build(batch, cache, config, self.inverse_frequencies)
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

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] to [R, vocab] float32."""
        return F.linear(hidden, self.weights.head.dense()).float()

    def forward_train(
        self,
        token_ids: Tensor,
        lengths: Sequence[int],
        lora: LoraParams | None,
        *,
        recompute: Recompute,
        give_way: Callable[[], None],
    ) -> Tensor:
        """The differentiable forward over packed documents; gradients reach the adapter only.

        Args:
            token_ids: [T] int64, documents end to end. Convolution, recurrence and attention restart at each.
            lengths: tokens of each document, each at least 1.
            lora: masters on the model's device; None: the base model.
            recompute: what the backward computes again instead of keeping it: "none", "selective" (the inside of mixers
                and the first product of the MLP) or "full" (whole layers).
            give_way: called between layers, in the backward too. On CUDA autograd runs the backward of a layer on a
                thread of its own unless torch.autograd.set_multithreading_enabled(False) is in force.

        Returns:
            [T, hidden]: final hidden states, normed.

        Raises:
            ValueError: the lengths do not add up to T.
        """
        if self.device.type == "cuda":
            # Imported here: only engines on a GPU have Triton.
            from services.engine.models.qwen3_5.training import trunk

            return trunk.forward_packed(
                token_ids,
                lengths,
                self.config,
                self.weights,
                self.inverse_frequencies,
                lora,
                recompute=recompute,
                give_way=give_way,
            )
        return plain.forward_packed(
            token_ids,
            lengths,
            self.config,
            self.weights,
            self.inverse_frequencies,
            lora,
            recompute=recompute,
            give_way=give_way,
        )

    def token_logprobs(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: float = 1.0,
        *,
        give_way: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """See token_scores()."""
        return self.token_scores(hidden, targets, temperature, give_way=give_way).logprobs

    def token_scores(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: float = 1.0,
        *,
        give_way: Callable[[], None] = lambda: None,
    ) -> TokenScores:
        """``log softmax(logits / temperature)[target]``, differentiable in ``hidden``, and whether no other token is
        likelier; the logits exist a tile of rows at a time.

        Args:
            hidden: [N, hidden], from forward_train().
            targets: [N] int64.
            give_way: called between two tiles.
        """
        if self.device.type == "cuda":
            from kernels.gpu.train import head

            return head.token_scores(hidden, self.weights.head.dense(), targets, temperature, give_way=give_way)
        return token_scores(hidden, self.weights.head.dense(), targets, temperature, give_way=give_way)

    def divergence(
        self,
        hidden: Tensor,
        teacher: Qwen3_5,
        teacher_hidden: Tensor,
        *,
        beta: float,
        temperature: float,
        give_way: Callable[[], None] = lambda: None,
    ) -> Divergence:
        """How far this model's next-token distributions are from a teacher's, over the tokens that both heads have
        (checkpoints pad their vocabularies differently); differentiable in ``hidden`` only.

        Args:
            hidden: [N, hidden], from forward_train().
            teacher: on the same device, with the same tokens.
            teacher_hidden: [N, the teacher's hidden].
            beta, temperature, give_way: see kernels.divergence.
        """
        both = min(self.config.vocab_size, teacher.config.vocab_size)
        heads = self.weights.head.dense()[:both], teacher.weights.head.dense()[:both]
        compare = divergence
        if self.device.type == "cuda":
            from kernels.gpu.train.divergence import divergence as compare
        return compare(
            hidden, heads[0], teacher_hidden, heads[1], beta=beta, temperature=temperature, give_way=give_way
        )

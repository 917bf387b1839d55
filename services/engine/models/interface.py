"""The interface of a loaded model: what the executors, the pod and the trainer know of an architecture."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kernels.divergence import Divergence, divergence
from kernels.token_logprobs import TokenScores, token_scores
from services.common.adapters.drafter_form import MTP_FORM, DrafterForm
from services.common.errors import InvalidRequest
from services.engine.models.batch import CacheBuffers, ForwardBatch
from services.engine.models.config import ModelConfig
from services.engine.models.footprint import PLAIN, Storage
from services.engine.models.lora.lora_batch import LoraBatch
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.weights.drafter import TakesDrafters

if TYPE_CHECKING:
    from kernels.gpu.configs import KernelConfigs
    from services.engine.models.device_batch import DecodeAttention, DeviceCache, StepRows
    from services.engine.models.training_arena import GraphMemory

Recompute = Literal["none", "selective", "full"]
"""Extent to which the backward computes the forward again: only what is nearly free; also the inside of mixers and the
first product of the MLP; or whole layers."""


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


class DeviceForward(Protocol):
    """The forward pass of serving on a GPU. It launches kernels, never waits for the device, and can be captured."""

    @property
    def rows_that_differ(self) -> Sequence[int]:
        """Numbers of rows from which on a step without captured graphs launches kernels that fewer rows do not, where
        that is decided by more than each product's own rows."""
        ...

    @property
    def prompts_apart(self) -> int:
        """Fewest rows of prompts in a step from which on its decodes may be computed apart from them; 0: never."""
        ...

    def one_of_each_layer(self) -> Self:
        """A forward of the first layers only that launches every kernel."""
        ...

    def layers(
        self, rows: StepRows, attention: DecodeAttention | None, *, adapters: bool, apart: bool = True
    ) -> Tensor:
        """[T, hidden]: the residual stream behind the last layer; the caches are updated in place. Not ``apart``:
        decodes are computed together with prompts, which takes half the launches."""
        ...

    def logits(self, x: Tensor) -> Tensor:
        """[R, hidden] of layers() to logits [R, vocab] in the model's dtype."""
        ...

    def normed(self, x: Tensor) -> Tensor:
        """[R, hidden] of layers() to final hidden states."""
        ...

    def draft(self, x: Tensor, rows: StepRows, attention: DecodeAttention | None) -> Tensor:
        """Output of the drafter behind layers(), [T, hidden], for draft_logits()."""
        ...

    def draft_on(self, y: Tensor, rows: StepRows, attention: DecodeAttention | None) -> Tensor:
        """Output of the mtp layer behind its own output of some rows, one token further, [C, hidden]."""
        ...

    def draft_block(self, y: Tensor, rows: StepRows, attention: DecodeAttention) -> Tensor:
        """Output of a block drafter at the places behind some rows, given its own output there, [C, hidden]: of each of
        C groups of ``rows``, [C · group, hidden]."""
        ...

    def draft_logits(self, y: Tensor) -> Tensor:
        """[R, hidden] of draft() to logits [R, vocab] of the draft tokens."""
        ...


class CapturedForwards(Protocol):
    """Forwards of training that are captured as CUDA graphs. Only the newest can be gone back through."""

    def differentiable(self, token_ids: Tensor, lengths: Sequence[int], give_way: Callable[[], None]) -> Tensor | None:
        """[T, hidden] with gradients for the adapter; None: so many rows are not captured."""
        ...

    def frozen(self, token_ids: Tensor, lengths: Sequence[int], give_way: Callable[[], None]) -> Tensor | None:
        """[T, hidden] without gradients; None: so many rows are not captured."""
        ...


class Probe:
    """Observer of a forward at its output projections, which it may also change there. This one changes nothing."""

    def output(self, path: str, inputs: Tensor) -> Tensor:  # noqa: ARG002
        """What goes into an output projection instead of its inputs.

        Args:
            path: "layers.3.mlp.down_proj".
            inputs: [T, in].
        """
        return inputs

    def layer(self, index: int, before: Tensor, after: Tensor) -> None:
        """Sees the residual stream [T, hidden] before and after a layer."""
        del index, before, after


class CausalLM(TakesDrafters, ABC):
    """Language model with one copy of the frozen weights, used by the engine loop and the trainer thread alike. Nothing
    here changes after construction but the mtp layer, between two steps; the caches belong to the caller."""

    config: ModelConfig

    @classmethod
    @abstractmethod
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
    ) -> CausalLM:
        """Loads a checkpoint directory; see services.engine.models.registry.load_model."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of all weights."""

    @abstractmethod
    def head(self) -> Tensor:
        """[vocab, hidden]: the matrix that logits come from, decoded if it is quantized."""

    def kernel_configs(self) -> KernelConfigs:
        """Configurations of the GPU's kernels that this model is run by; those that fit its device where it was loaded
        with no others."""
        # Imported here: only engines on a GPU have Triton.
        from kernels.gpu.configs import KernelConfigs

        return KernelConfigs.on(self.device)

    # Serving.

    def allocate_cache(self, num_blocks: int, block_size: int, num_slots: int) -> CacheBuffers:
        """Zeroed caches. Both numbers count the scratch block 0 and the scratch slot 0."""
        layout = self.config.cache_layout

        def zeros(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        pages = (num_blocks, block_size, layout.kv_heads, layout.head_dim)
        states = (num_slots, layout.state_heads, layout.state_key_dim, layout.state_value_dim)
        conv = (num_slots, layout.conv_kernel - 1, layout.conv_channels)
        drafting = 0 if self.drafter_form is None else self.drafter_form.layers
        full, recurrent = range(layout.kv_layers + drafting), range(layout.state_layers)
        return CacheBuffers(
            keys=[zeros(*pages) for _ in full],
            values=[zeros(*pages) for _ in full],
            # Channels are contiguous in memory: a decode step reads whole rows of them.
            conv_states=[zeros(*conv).transpose(1, 2) for _ in recurrent],
            recurrent_states=[zeros(*states, dtype=torch.float32) for _ in recurrent],
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
        hidden, _ = self.forward_all(batch, cache, lora)
        return hidden.index_select(0, batch.logit_rows)

    @abstractmethod
    def forward_all(self, batch: ForwardBatch, cache: CacheBuffers, lora: LoraSlots | None) -> tuple[Tensor, Any]:
        """Runs one step, updating the caches in place.

        Returns:
            [T, hidden]: final hidden states, normed, of all rows; and the step as draft() takes it.
        """

    def begin_step(self, batch: ForwardBatch, cache: CacheBuffers) -> Any:  # noqa: ARG002
        """Clears the states of sequences that start in a batch which is then run piece by piece.

        Returns:
            The whole batch as draft() takes it.
        """
        return None

    def draft(self, hidden: Tensor, next_ids: Tensor, step: Any, cache: CacheBuffers) -> Tensor:
        """Runs the mtp layer behind forward_all(): row by row, one token further; adapters play no part.

        Args:
            hidden: [T, hidden], what forward_all() returned.
            next_ids: [T] int64, the token behind each row's.

        Returns:
            [T, hidden]: for logits() of the token after that.
        """
        del hidden, next_ids, step, cache
        raise ValueError("the mtp layer is not loaded")

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] to [R, vocab] float32."""
        return F.linear(hidden, self.head()).float()

    def device_forward(
        self,
        cache: DeviceCache,
        lora: LoraSlots,
        *,
        tables: Tensor,
        last_tokens: Tensor,
        batch_invariant: bool = False,
        pdl: bool = False,
    ) -> DeviceForward:
        """The forward of serving on a GPU.

        Args:
            tables: [num_slots, max_blocks] int32, the block table of every state slot; row 0 is zeros.
            last_tokens: [num_slots] int32, the token sampled last for every state slot.
            batch_invariant: a row's bits depend on no other row. The matrices and adapters must have been made so too.
            pdl: launch kernels before the ones ahead have finished (kernels.gpu.launch.programmatic).

        Raises:
            InvalidRequest: the architecture has none.
        """
        del cache, lora, tables, last_tokens, batch_invariant, pdl
        raise InvalidRequest(f"{type(self).__name__} has no forward on a GPU: use TEMPER_DEVICE=cpu", param="device")

    # Training.

    def train_in_float8(self) -> None:
        """Has training forwards on a GPU multiply with the frozen weights in float8 from now on, by copies that are
        made here; the plain forward of a CPU stays as it is.

        Raises:
            InvalidRequest: the architecture cannot.
        """
        raise InvalidRequest(
            f"{type(self).__name__} does not train in float8: unset TEMPER_TRAIN_FLOAT8", param="train_float8"
        )

    @abstractmethod
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
        """The differentiable forward over packed documents; gradients reach the adapter only.

        Args:
            token_ids: [T] int64, documents end to end. Whatever looks back restarts at each.
            lengths: tokens of each document, each at least 1.
            lora: masters on the model's device; of several adapters each changes its own documents only. None: the base
                model.
            recompute: what the backward computes again instead of keeping it: "none", "selective" (the inside of mixers
                and the first product of the MLP) or "full" (whole layers).
            give_way: called between layers, in the backward too. On CUDA autograd runs the backward of a layer on a
                thread of its own unless torch.autograd.set_multithreading_enabled(False) is in force.
            parents: of each document the one that it goes on from, whose tokens are read before its own; None: it
                begins. Those behind n others stand behind all that are behind fewer. Only where ``shares_prefixes``.

        Returns:
            [T, hidden]: final hidden states, normed.

        Raises:
            ValueError: the lengths do not add up to T.
        """

    @property
    def shares_prefixes(self) -> bool:
        """forward_train() takes documents that go on from others: what they share is computed once, and gets the
        gradients of all of them."""
        return False

    def forward_probed(
        self,
        token_ids: Tensor,
        lengths: Sequence[int],
        probe: Probe,
        *,
        recompute: Recompute = "none",
        give_way: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """The forward of forward_train() without an adapter, with a probe. Where gradients are enabled it is in plain
        torch on every device, and they reach what the probe puts in the place of inputs, and weights that require them.

        Raises:
            InvalidRequest: the architecture has none.
            ValueError: the lengths do not add up to T.
        """
        del token_ids, lengths, probe, recompute, give_way
        raise InvalidRequest(f"{type(self).__name__} cannot be probed", param="model")

    def with_weights(self, tensors: Mapping[str, Tensor]) -> CausalLM:
        """A model with these tensors in the place of its own; it shares all others, and is differentiable in these by
        forward_probed().

        Args:
            tensors: of layers and of the last norm, by canonical name ("layers.3.mlp.down_proj.weight"), as a
                checkpoint has them, on the model's device.

        Raises:
            InvalidRequest: the architecture or the storage of one of them does not allow it.
            ValueError: one is misshaped.
        """
        del tensors
        raise InvalidRequest(f"weights of {type(self).__name__} cannot be replaced", param="model")

    def captured_forwards(
        self,
        lora: LoraParams | None,
        recompute: Recompute | None,
        memory: GraphMemory,
        most_tokens: int | None,
    ) -> CapturedForwards | None:
        """forward_train() of few tokens as CUDA graphs; None: the architecture has none.

        Args:
            lora: the masters. Their gradients must stay where they are: zero them, do not drop them. None: the base
                model.
            recompute: what the backwards compute again; None: there will be none, and the masters stay as they are.
            memory: where the graphs compute.
            most_tokens: of the forwards that it has room for; None: of all that are captured.
        """
        del lora, recompute, memory, most_tokens
        return None

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
            # Imported here: only engines on a GPU have Triton.
            from kernels.gpu.train import head

            return head.token_scores(hidden, self.head(), targets, temperature, give_way=give_way)
        return token_scores(hidden, self.head(), targets, temperature, give_way=give_way)

    def divergence(
        self,
        hidden: Tensor,
        teacher: CausalLM,
        teacher_hidden: Tensor,
        *,
        beta: float,
        temperature: float,
        give_way: Callable[[], None] = lambda: None,
    ) -> Divergence:
        """Divergence of this model's next-token distributions from a teacher's, over the tokens that both heads have
        (checkpoints pad their vocabularies differently); differentiable in ``hidden`` only.

        Args:
            hidden: [N, hidden], from forward_train().
            teacher: on the same device, with the same tokens.
            teacher_hidden: [N, the teacher's hidden].
            beta, temperature, give_way: see kernels.divergence.
        """
        both = min(self.config.vocab_size, teacher.config.vocab_size)
        heads = self.head()[:both], teacher.head()[:both]
        compare = divergence
        if self.device.type == "cuda":
            from kernels.gpu.train.divergence import divergence as compare
        return compare(
            hidden, heads[0], teacher_hidden, heads[1], beta=beta, temperature=temperature, give_way=give_way
        )

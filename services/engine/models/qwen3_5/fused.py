"""The forward pass on a CUDA device: a few fused kernels a layer, decodes and prefill segments in one batch.

The plain twin is Qwen3_5.forward; tests/parity holds the two together. Everything that varies between steps of one
shape is read on the device, so that a step can be captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.gpu.attention.decode import paged_decode
from kernels.gpu.attention.pages import KvPages
from kernels.gpu.attention.prefill import paged_prefill
from kernels.gpu.attention.qk_rope import qk_norm_rope_write
from kernels.gpu.configs import KernelConfigs
from kernels.gpu.copies.embedding import gather_tokens
from kernels.gpu.delta import chunk_configs
from kernels.gpu.delta.chunk import gated_delta_prefill
from kernels.gpu.delta.chunk_configs import ChunkConfig
from kernels.gpu.delta.conv1d import conv_decode, conv_prefill
from kernels.gpu.delta.conv_verify import conv_verify
from kernels.gpu.delta.step import gated_delta_step
from kernels.gpu.delta.verify import gated_delta_verify
from kernels.gpu.linear.skinny import Convolution, Norm
from kernels.gpu.lora.rows import LoraRows
from kernels.gpu.rms_norm import rms_norm
from kernels.rope import Rotation
from services.engine.models.device_batch import DecodeAttention, DeviceCache, StepRows
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.qwen3_5.fused_experts import Mixture
from services.engine.models.qwen3_5.side_stream import SideStream
from services.engine.models.qwen3_5.weights import (
    AttentionWeights,
    DeltaNetWeights,
    LayerWeights,
    ModelWeights,
    MtpWeights,
)
from services.engine.models.residual import Residual

_GROUPS = ("in", "out", "gate_up", "down")
"""Linear layers that share an input; see lora_targets.layer_groups()."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a step that are multiplied together."""

    rows: slice
    stream: Residual
    adapters: Tensor
    """[rows] int32: LoRA slot of each."""
    layers: Sequence[LayerWeights]
    """What they are multiplied with."""


class FusedForward:
    """Launches the kernels of a step and never waits for the device.

    Args:
        rotation: of queries and keys.
        tables: [num_slots, max_blocks] int32, the block table of every state slot; row 0 is zeros.
        last_tokens: [num_slots] int32, the token sampled last for every state slot.
        batch_invariant: each kernel cuts its work in one way, whatever the batch: sums are taken in the same order, and
            a row's bits depend on no other row. The matrices and adapters must have been made so too.
        pdl: launch kernels before the ones ahead have finished (kernels.gpu.launch.programmatic).
    """

    def __init__(
        self,
        config: Qwen3_5Config,
        weights: ModelWeights,
        rotation: Rotation,
        cache: DeviceCache,
        lora: LoraSlots,
        *,
        tables: Tensor,
        last_tokens: Tensor,
        batch_invariant: bool = False,
        pdl: bool = False,
    ) -> None:
        self._config, self._weights, self._rotation = config, weights, rotation
        self._cache, self._lora = cache, lora
        self._prompt_layers = tuple(layer.of_prompts() for layer in weights.layers)
        self._tables, self._last_tokens = tables, last_tokens
        self._pdl = pdl
        self._kernels = weights.kernels or KernelConfigs.on(weights.embedding.device)
        self._side_stream = SideStream(weights.embedding.device)
        self._mixture = Mixture(self._kernels.device, batch_invariant=batch_invariant)
        self._chunk: ChunkConfig | None = None
        self._late: bool | None = None
        """True if decodes let writes to states wait; None: by their number."""
        self._rope = (0, 0, 0)
        """Rows, heads and warps of a program; 0: the kernel's own choice."""
        if batch_invariant:
            exact = weights.embedding.dtype == torch.float32
            self._chunk = chunk_configs.EXACT if exact else chunk_configs.many(self._kernels.device)
            self._late = False
            self._rope = (4, 1, 4)

    @property
    def rows_that_differ(self) -> tuple[int, ...]:
        """See DeviceForward."""
        experts = self._weights.layers[0].experts
        differ = () if experts is None else self._mixture.rows_that_differ(experts)
        return (*differ, self._weights.prompt_rows) if self._weights.prompt_rows else differ

    @property
    def prompts_apart(self) -> int:
        """See DeviceForward."""
        return self._weights.prompt_rows

    def one_of_each_layer(self) -> FusedForward:
        """A model of the first layers only, as many as it takes to have one of each kind behind another: it launches
        every kernel."""
        behind = [type(layer.mixer) for layer in self._weights.layers[1:]]
        count = 2 + max(map(behind.index, behind), default=-1)
        short = replace(self._weights, layers=self._weights.layers[:count])
        made = copy(self)
        made._weights = short
        return made

    def layers(
        self, rows: StepRows, attention: DecodeAttention | None, *, adapters: bool, apart: bool = True
    ) -> Tensor:
        """Runs all layers and updates the caches in place.

        Args:
            attention: for a step with decodes.
            adapters: False: no row has one, and none of their kernels is launched.
            apart: False: prompts beside decodes are multiplied with the weights, too, not with their copies.

        Returns:
            [T, hidden]: the residual stream behind the last layer, before the final norm.
        """
        eps, pdl = self._config.rms_norm_eps, self._pdl
        x = gather_tokens(rows.tokens, self._last_tokens, rows.slots, self._weights.embedding)
        parts = self._parts(x, rows, apart)
        full = linear = 0
        for index, layer in enumerate(self._weights.layers):
            lora = [self._adapters(index, part.adapters, rows) if adapters else {} for part in parts]
            mixer = layer.mixer
            conv = None
            alone = rows.segments is None and rows.group == 1
            if isinstance(mixer, DeltaNetWeights) and alone and mixer.in_proj.convolves(len(x)):
                conv = Convolution(self._cache.conv[linear], mixer.conv, rows.slots)
            norm = Norm(layer.input_norm, eps)
            # Of several parts the products go side by side into one tensor, which the mixer takes.
            into = torch.empty(len(x), mixer.in_proj.shape[0], dtype=x.dtype, device=x.device) if parts[1:] else None
            for part, own in zip(parts, lora, strict=True):
                out = None if into is None else into[part.rows]
                matrix = part.layers[index].mixer.in_proj
                made = matrix.project(part.stream, norm=norm, lora=own.get("in"), conv=conv, out=out, pdl=pdl)
            projected = made if into is None else into
            if isinstance(mixer, DeltaNetWeights):
                mixed = self._delta_net(projected, conv is not None, mixer, rows, linear)
                linear += 1
            else:
                mixed = self._attention(projected, mixer, rows, attention, self._cache.pages[full])
                full += 1
            for part, own in zip(parts, lora, strict=True):
                following = part.layers[index + 1] if index + 1 < len(self._weights.layers) else None
                here = part.layers[index]
                self._rest_of_layer(part.stream, mixed[part.rows], here, own, following, joined=rows.mixed)
        for part in parts:
            part.stream.settled()
        return x

    def _parts(self, x: Tensor, rows: StepRows, apart: bool) -> list[_Part]:
        """Rows of a step that are multiplied together: all of them, or decodes apart from prompts where these are
        multiplied with copies."""
        decodes, layers = rows.decodes, self._weights.layers
        together = rows.segments is None or (rows.mixed and not apart)
        if together or not self._weights.prompts_in_float8(len(x) - decodes):
            return [_Part(slice(None), Residual(x), rows.adapters, layers)]
        if not decodes:
            return [_Part(slice(None), Residual(x), rows.adapters, self._prompt_layers)]
        # A copy, because a kernel has variants for addresses that 16 bytes do not divide.
        ahead, behind = slice(decodes), slice(decodes, None)
        return [
            _Part(ahead, Residual(x[ahead]), rows.adapters[ahead], layers),
            _Part(behind, Residual(x[behind]), rows.adapters[behind].clone(), self._prompt_layers),
        ]

    def logits(self, x: Tensor) -> Tensor:
        """Logits [R, vocab] in the model's dtype from layers()' output for the rows to sample, [R, hidden]."""
        norm = Norm(self._weights.final_norm, self._config.rms_norm_eps)
        return self._weights.head.project(x, norm=norm, pdl=self._pdl)

    def normed(self, x: Tensor) -> Tensor:
        """Final hidden states: layers()' output for some rows, normed."""
        return rms_norm(x, self._weights.final_norm, self._config.rms_norm_eps, pdl=self._pdl)

    def draft(self, x: Tensor, rows: StepRows, attention: DecodeAttention | None) -> Tensor:
        """Runs the drafter behind layers(), on what that returned and ``rows.next_ids``; adapters play no part.

        Returns:
            [T, hidden], for draft_logits(), and draft_on() or draft_block().
        """
        return self._draft(self._known(rows), self.normed(x), rows, attention)

    def draft_on(self, y: Tensor, rows: StepRows, attention: DecodeAttention | None) -> Tensor:
        """Runs the mtp layer behind itself, on what draft() or draft_on() returned for some rows, one token further."""
        return self._draft(self._known(rows), self._proposed(y), rows, attention)

    def draft_block(self, y: Tensor, rows: StepRows, attention: DecodeAttention) -> Tensor:
        """Runs a block drafter behind itself, on what draft() returned for some rows, at all places behind each: those
        are a group of ``rows``."""
        places = self._mtp.places
        if places is None or rows.group > len(places):
            raise ValueError(f"no block drafter of {1 + rows.group} tokens is loaded")
        tokens = places[: rows.group].repeat(len(y), 1)
        return self._draft(tokens, self._proposed(y).repeat_interleave(rows.group, 0), rows, attention)

    def _known(self, rows: StepRows) -> Tensor:
        """Embeddings of the tokens behind rows."""
        if rows.next_ids is None:
            raise ValueError("a step without the tokens behind its rows")
        return gather_tokens(rows.next_ids, self._last_tokens, rows.slots, self._weights.embedding)

    def _proposed(self, y: Tensor) -> Tensor:
        """Hidden states that the drafter itself has made."""
        return rms_norm(y, self._mtp.final_norm, self._config.rms_norm_eps, pdl=self._pdl)

    def _draft(self, tokens: Tensor, hidden: Tensor, rows: StepRows, attention: DecodeAttention | None) -> Tensor:
        mtp, eps, pdl = self._mtp, self._config.rms_norm_eps, self._pdl
        both = torch.empty(len(hidden), 2 * hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
        rms_norm(tokens, mtp.embedding_norm, eps, out=both[:, : hidden.shape[1]], pdl=pdl)
        rms_norm(hidden, mtp.hidden_norm, eps, out=both[:, hidden.shape[1] :], pdl=pdl)
        y = Residual(mtp.fc.project(both, pdl=pdl))
        pages = self._cache.pages[self._config.cache_layout.kv_layers :]
        for index, layer in enumerate(mtp.layers):
            mixer = layer.mixer
            projected = mixer.in_proj.project(y, norm=Norm(layer.input_norm, eps), pdl=pdl)
            if isinstance(mixer, DeltaNetWeights):
                raise ValueError("a drafter's layers are of full attention")
            mixed = self._attention(projected, mixer, rows, attention, pages[index])
            following = mtp.layers[index + 1] if index + 1 < len(mtp.layers) else None
            self._rest_of_layer(y, mixed, layer, {}, following)
        return y.settled()

    def draft_logits(self, y: Tensor) -> Tensor:
        """Logits [R, vocab] of the draft tokens from draft()'s output for some rows, [R, hidden]."""
        head = self._mtp.head or self._weights.head
        return head.project(y, norm=Norm(self._mtp.final_norm, self._config.rms_norm_eps), pdl=self._pdl)

    @property
    def _mtp(self) -> MtpWeights:
        if self._weights.mtp is None:
            raise ValueError("the mtp layer is not loaded")
        return self._weights.mtp

    def _rest_of_layer(
        self,
        x: Residual,
        mixed: Tensor,
        layer: LayerWeights,
        lora: Mapping[str, LoraRows],
        following: LayerWeights | None = None,
        *,
        joined: bool = False,
    ) -> None:
        """The rest of a layer behind its mixer; ``following`` is the layer that reads x next, ``joined`` whether
        kernels on two streams made ``mixed``."""
        eps, pdl = self._config.rms_norm_eps, self._pdl
        norm, experts = Norm(layer.post_norm, eps), layer.experts
        first = layer.gate_up if experts is None else experts.router
        out_proj = layer.mixer.out_proj
        out_proj.add_to(x, mixed, ahead=(norm, first), lora=lora.get("out"), pdl=pdl and not joined)
        ahead = None if following is None else (Norm(following.input_norm, eps), following.mixer.in_proj)
        if experts is not None:
            self._mixture.add_to(x, layer, experts, eps, lora, ahead=ahead, pdl=pdl)
            return
        active = layer.gate_up.project(x, norm=norm, swiglu=True, lora=lora.get("gate_up"), pdl=pdl)
        layer.down.add_to(x, active, ahead=ahead, lora=lora.get("down"), pdl=pdl)

    def _adapters(self, layer: int, row_adapters: Tensor, rows: StepRows) -> Mapping[str, LoraRows]:
        return {group: self._lora.rows(layer, group, row_adapters, rows.active_adapters) for group in _GROUPS}

    def _attention(
        self,
        projected: Tensor,
        weights: AttentionWeights,
        rows: StepRows,
        attention: DecodeAttention | None,
        pages: KvPages,
    ) -> Tensor:
        eps, tables = self._config.rms_norm_eps, self._tables
        # Each row of a group sees the rows before it in the pages, where they have been written by then.
        decodes = rows.decodes
        q = qk_norm_rope_write(
            projected,
            weights.qk_norm,
            eps,
            self._rotation,
            rows.positions,
            rows.slots,
            tables,
            pages,
            rows_a_program=self._rope[0],
            heads_a_program=self._rope[1],
            num_warps=self._rope[2],
            pdl=self._pdl,
        )
        out = torch.empty(len(projected), self._config.query_size, dtype=projected.dtype, device=projected.device)
        if decodes:
            if attention is None:
                raise ValueError(f"{decodes} decodes without a configuration of their attention")
            with self._decoding(rows) as pdl:
                paged_decode(
                    q[:decodes],
                    projected[:decodes],
                    pages,
                    tables,
                    rows.slots[:decodes],
                    rows.positions[:decodes],
                    attention.splits,
                    workspace=attention.workspace,
                    config=attention.config or self._kernels.decode(pages, decodes // rows.group),
                    out=out[:decodes],
                    together=rows.group,
                    pdl=pdl,
                )
        if rows.segments is not None:
            paged_prefill(
                q, projected, pages, tables, rows.segments, out=out, device=self._kernels.device, pdl=self._pdl
            )
        self._side_stream.join()
        return out

    @contextmanager
    def _decoding(self, rows: StepRows) -> Iterator[bool]:
        """Stream on which a mixer's kernels for decodes are launched, and whether early: those move states and pages, a
        prefill's compute, so that neither need wait for the other."""
        if rows.mixed:
            with self._side_stream.launching():
                yield False
        else:
            yield self._pdl

    def _delta_net(
        self, projected: Tensor, convolved: bool, weights: DeltaNetWeights, rows: StepRows, linear: int
    ) -> Tensor:
        """``convolved``: the projection has done the convolution, in place of what it is of."""
        config, decodes = self._config, rows.decodes
        conv, recurrent = self._cache.conv[linear], self._cache.recurrent[linear]
        waiting = None if self._cache.waiting is None else self._cache.waiting[linear]
        mixed = projected[:, : config.conv_dim]
        if not convolved:
            mixed = torch.empty(mixed.shape, dtype=projected.dtype, device=projected.device)
        out = torch.empty(len(projected), config.value_size, dtype=projected.dtype, device=projected.device)
        parameters = (weights.negative_a, weights.dt_bias, weights.norm, config.rms_norm_eps)
        if decodes and rows.group > 1:
            self._verify(projected, mixed, out, parameters, weights, rows, linear)
        elif decodes:
            here, slots = projected[:decodes], rows.slots[:decodes]
            with self._decoding(rows) as pdl:
                if not convolved:
                    conv_decode(here, weights.conv, conv, slots, out=mixed[:decodes], pdl=pdl)
                gated_delta_step(
                    mixed[:decodes],
                    here,
                    *parameters,
                    recurrent,
                    slots,
                    waiting=waiting,
                    late=self._late,
                    device=self._kernels.device,
                    out=out[:decodes],
                    pdl=pdl,
                )
        if rows.segments is not None:
            conv_prefill(projected, weights.conv, conv, rows.segments, out=mixed, pdl=self._pdl)
            gated_delta_prefill(
                mixed,
                projected,
                *parameters,
                recurrent,
                rows.segments,
                waiting=waiting,
                out=out,
                config=self._chunk,
                device=self._kernels.device,
                pdl=self._pdl,
            )
        self._side_stream.join()
        return out

    def _verify(
        self,
        projected: Tensor,
        mixed: Tensor,
        out: Tensor,
        parameters: tuple[Tensor, Tensor, Tensor, float],
        weights: DeltaNetWeights,
        rows: StepRows,
        linear: int,
    ) -> None:
        """Convolution and rule of rows in groups. Their states do not move on before it is known which tokens count."""
        cache, group, pdl = self._cache, rows.group, self._pdl
        if cache.waiting is None or cache.verified is None:
            raise ValueError("draft tokens need a cache with waiting writes and verified rows")
        kept = cache.verified[linear]
        conv_verify(projected, weights.conv, cache.conv[linear], rows.slots, kept, group, out=mixed, pdl=pdl)
        state, waiting = cache.recurrent[linear], cache.waiting[linear]
        gated_delta_verify(mixed, projected, *parameters, state, rows.slots, waiting, group, out=out, pdl=pdl)

"""Adapters on their way from the bytes of a file into the slots of a GPU.

The bytes travel as they are, a piece at a time through page-locked memory, and one kernel a piece converts, scales,
checks and lays out all of its matrices. Prepared on the CPU, an adapter on all linear layers was some 7,000 small
operators; each hands over the interpreter's lock, which the thread that serves wants too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.gpu.lora.fill import ENTRY, FORMATS, WORDS, fill_lora, tiles_of
from services.engine.models.lora.binding import BoundAdapter
from services.engine.models.lora.targets import TargetBuffers
from services.engine.models.weights.upload import Uploader

_ALIGNMENT = 16
"""Alignment of runs of memory: a number that is aligned in memory is aligned in a piece as well."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Piece of an adapter that is copied to the device at once."""

    runs: Sequence[tuple[int, int, int]]
    """Address, place in the piece, bytes."""
    tiles: int
    """Index one past the piece's last tile."""


@dataclass(frozen=True, slots=True)
class UploadPlan:
    """Plan for copying an adapter into any slot."""

    entries: npt.NDArray[np.void]
    """[entries] of ENTRY for slot 0, in the order in which they travel."""
    slot_bytes: npt.NDArray[np.int64]
    """Distance from an entry's target to the same target in the next slot."""
    tiles: npt.NDArray[np.int32]
    """[tiles, 2] of the entries."""
    pieces: Sequence[_Piece]
    held: Sequence[Tensor | None]
    """Tensors that the addresses point into, kept alive here."""

    def relative(self, address: int, size: int) -> UploadPlan | None:
        """Plan for any data laid out like that at ``address``, as far from a multiple of 16; None if something lies
        elsewhere. It holds no tensors."""
        runs = [run for piece in self.pieces for run in piece.runs]
        if not all(address <= begin and begin + length <= address + size for begin, _, length in runs):
            return None
        pieces = [replace(p, runs=[(begin - address, at, length) for begin, at, length in p.runs]) for p in self.pieces]
        return replace(self, pieces=pieces, held=())


class AdapterUpload:
    """Writes adapters into slots. Used by one thread at a time, on its current stream.

    Args:
        order: [n] int64: where the columns of ordered places come from.
        piece: bytes that travel at once: of each of two page-locked buffers and of one on the device.

    Raises:
        ValueError: a matrix of float32 and the largest rank may not fit into a piece.
    """

    def __init__(self, places: Sequence[TargetBuffers], order: Tensor, piece: int) -> None:
        self._places = places
        self._like = places[0].a
        device, self._max_rank = self._like.device, self._like.shape[1]
        halves = [(half, place.ordered and half is place.b) for place in places for half in (place.a, place.b)]
        # Of A and B of each place in turn: all that no adapter changes.
        self._fixed = np.zeros(len(halves), ENTRY)
        self._fixed["columns"] = [half.shape[2] for half, _ in halves]
        self._fixed["target"] = [half.data_ptr() for half, _ in halves]
        self._fixed["target_step"] = [half.stride(1) for half, _ in halves]
        self._fixed["ordered"] = [ordered for _, ordered in halves]
        self._slot_bytes = np.array([half.stride(0) * half.element_size() for half, _ in halves])
        widest = int(self._fixed["columns"].max())
        if piece < self._max_rank * widest * 4 + _ALIGNMENT:
            raise ValueError(f"a matrix of {self._max_rank} x {widest} does not fit into {piece} bytes")
        self._uploader = Uploader(device, piece)
        self._piece = torch.empty(piece, dtype=torch.uint8, device=device)
        # Of an adapter on all of them: fault, entries, tiles.
        self._entry_words = WORDS * len(halves)
        words = 2 + self._entry_words + len(tiles_of(self._fixed["columns"], self._max_rank))
        self._host_table = torch.zeros(words, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._table = torch.zeros(words, dtype=torch.int64, device=device)
        self._fault = self._table[:1].view(torch.int32)[:1]
        self._entries = self._table[2 : 2 + self._entry_words].view(-1, WORDS)
        self._tiles = self._table[2 + self._entry_words :].view(torch.int32).view(-1, 2)
        self._order = order.to(device, torch.int32)

    def warm_up(self) -> None:
        """Launches the kernel on nothing, which compiles it."""
        self._table.zero_()
        self._fill(0, 1)

    def write(self, slot: int, plan: UploadPlan, address: int = 0) -> bool:
        """Writes the groups of a plan, whole.

        Args:
            plan: from plan().
            address: of the data that a plan of relative() is for.

        Returns:
            Whether all numbers are finite; those that are not were written as zeros. It is known because the device is
            done with everything.
        """
        entries = plan.entries.copy()
        entries["target"] += slot * plan.slot_bytes
        table = self._host_table.numpy()
        table[0] = 0
        table[2:][: WORDS * len(entries)] = entries.view(np.int64)
        table[2 + self._entry_words :][: len(plan.tiles)] = plan.tiles.view(np.int64)[:, 0]
        self._table.copy_(self._host_table, non_blocking=True)
        first = 0
        for piece in plan.pieces:
            self._uploader.gather(((address + offset, at, size) for offset, at, size in piece.runs), self._piece)
            self._fill(first, piece.tiles - first)
            first = piece.tiles
        self._host_table[:1].copy_(self._table[:1])
        return not int(table[0])

    def _fill(self, first: int, count: int) -> None:
        fill_lora(
            self._piece,
            self._entries,
            self._tiles,
            self._order,
            self._fault,
            self._like,
            first=first,
            count=count,
            max_rank=self._max_rank,
        )

    def plan(self, adapter: BoundAdapter, groups: Collection[tuple[int, str]]) -> UploadPlan:
        """Pieces that write() copies for an adapter, in the order in which its tensors lie in memory.

        Args:
            adapter: of rank max_rank at most, its tensors float32, bfloat16 or float16.
            groups: to write, whole: targets in them that the adapter does not have become zeros.
        """
        indices: list[int] = []
        tensors: list[Tensor | None] = []
        steps: list[tuple[int, int]] = []
        ranks: list[int] = []
        scales: list[float] = []
        for index, place in enumerate(self._places):
            if place.group not in groups:
                continue
            indices += (2 * index, 2 * index + 1)
            bound = adapter.targets.get(place.path)
            if bound is None:
                tensors += (None, None)
                steps += ((0, 0), (0, 0))
                ranks += (0, 0)
                scales += (0.0, 0.0)
                continue
            tensors += (_in_memory(bound.a), _in_memory(bound.b))
            steps += ((bound.a.shape[1], 1), (1, bound.rank))
            ranks += (bound.rank, bound.rank)
            scales += (1.0, bound.scale)
        # Those of no tensor first, then as they lie in memory.
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        order = sorted(range(len(indices)), key=addresses.__getitem__)
        sizes = [0 if tensor is None else tensor.nbytes for tensor in tensors]
        taken = np.array(indices)[order]
        entries = self._fixed[taken]
        tiles = tiles_of(entries["columns"], self._max_rank)
        ends = np.cumsum(np.bincount(tiles[:, 0], minlength=len(entries))).tolist()
        sources, pieces = self._pack([(addresses[n], sizes[n]) for n in order], ends)
        entries["source"] = sources
        entries["format"] = [0 if (tensor := tensors[n]) is None else FORMATS[tensor.dtype] for n in order]
        entries["rank"] = np.array(ranks)[order]
        entries["row_step"], entries["column_step"] = np.array(steps)[order].T
        entries["scale"] = np.array(scales, np.float32)[order].view(np.int32)
        return UploadPlan(entries, self._slot_bytes[taken], tiles, pieces, tensors)

    def _pack(self, spans: Sequence[tuple[int, int]], ends: Sequence[int]) -> tuple[list[int], list[_Piece]]:
        """Cuts ascending spans of memory (address, bytes) into pieces.

        Args:
            ends: of each span, one past its last tile.

        Returns:
            Of each span its place in its piece, and the pieces. Neighbours in memory become one run.
        """
        room = self._piece.numel()
        sources: list[int] = []
        pieces: list[_Piece] = []
        runs: list[tuple[int, int, int]] = []
        at = 0  # end of the last run in the piece
        for count, (address, size) in enumerate(spans):
            if not size:
                sources.append(0)
                continue
            adjacent = bool(runs) and runs[-1][0] + runs[-1][2] == address
            # As far from a multiple of the alignment as in memory, so that every number stays aligned.
            begin = at if adjacent else -(-at // _ALIGNMENT) * _ALIGNMENT + address % _ALIGNMENT
            if begin + size > room:
                pieces.append(_Piece(runs, ends[count - 1]))
                runs, adjacent, begin = [], False, address % _ALIGNMENT
            sources.append(begin)
            at = begin + size
            if adjacent:
                start, place, length = runs[-1]
                runs[-1] = (start, place, length + size)
            else:
                runs.append((address, begin, size))
        pieces.append(_Piece(runs, ends[-1]))
        return sources, pieces


def _in_memory(tensor: Tensor) -> Tensor:
    """The tensor as plain memory of the CPU."""
    return tensor if tensor.is_cpu and tensor.is_contiguous() else tensor.detach().cpu().contiguous()

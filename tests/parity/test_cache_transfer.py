"""Blocks and states on their way to host memory and back: the same bytes, the same checksums, nothing else touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import tests.kernels.gpu.interpreter  # noqa: F401
from services.engine.executors.cache_payload import Pieces
from services.engine.executors.cpu.cache_transfer import CpuCacheTransfer
from services.engine.executors.cuda.cache_transfer import CudaCacheTransfer
from services.engine.executors.cuda.pinned_memory import CudaRuntime, PinnedMemory
from services.engine.executors.cuda.stream import EngineStream
from services.engine.kv_offload.entry_format import WORD, checksum, weights
from services.engine.kv_offload.messages import Bytes, CacheTransfer
from services.engine.models.batch import CacheBuffers
from services.engine.models.config import ModelConfig
from services.engine.models.device_batch import DeviceCache
from tests.parity.fused_models import TINY, random_model, spoil

BLOCKS, BLOCK_SIZE, SLOTS = 40, 16, 7
SMALL = replace(TINY, layer_types=TINY.layer_types * 3)
ODD = replace(SMALL, linear_value_heads=3, linear_key_heads=3, linear_key_dim=12, linear_value_dim=8)
"""A state that is no whole number of 16 bytes."""
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Device:
    """A transfer and the pools behind it, random numbers in them."""

    def __init__(self, kind: str, config: ModelConfig, identity: str = "model") -> None:
        if kind != "torch":
            self._on_device(kind, config, identity)
            return
        model = random_model(config, torch.float32)
        cache: CacheBuffers = model.allocate_cache(BLOCKS, BLOCK_SIZE, SLOTS)
        spoil(cache)
        self.transfer: CacheTransfer = CpuCacheTransfer(cache, identity)
        self._blocks: Sequence[tuple[Tensor, int]] = [(pool, 0) for pool in (*cache.keys, *cache.values)]
        # As it lies in memory: channels last.
        conv = [pool.transpose(1, 2) for pool in cache.conv_states]
        self._states: Sequence[tuple[Tensor, int]] = [(pool, 0) for pool in (*conv, *cache.recurrent_states)]

    def _on_device(self, kind: str, config: ModelConfig, identity: str) -> None:
        cache = DeviceCache.allocate(
            config,
            torch.bfloat16,
            DEVICE,
            num_blocks=BLOCKS,
            block_size=BLOCK_SIZE,
            num_slots=SLOTS,
            kv_dtype=torch.float8_e4m3fn if kind == "float8" else None,
            waiting_writes=4 if kind == "waiting" else 0,
        )
        pages = [(page.keys, page.values, page.key_scales, page.value_scales) for page in cache.pages]
        self._blocks = [(pool, 0) for kinds in zip(*pages, strict=True) for pool in kinds if pool is not None]
        self._states = [(pool, 1) for pool in cache.state_pools()]
        generator = torch.Generator().manual_seed(0)
        for pool, _ in (*self._blocks, *self._states):
            raw = pool.view(torch.uint8)
            raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
        staging = CudaCacheTransfer(cache, EngineStream(DEVICE), identity).layout
        # Two blocks at a time, and a state in several parts.
        room = 2 * max(2 * staging.block_bytes, staging.slot_bytes // 2) + 24
        self.transfer = CudaCacheTransfer(cache, EngineStream(DEVICE), identity, staging_bytes=room)

    def block(self, index: int) -> bytes:
        return b"".join(_bytes(pool.select(at, index)) for pool, at in self._blocks)

    def state(self, slot: int) -> bytes:
        return b"".join(_bytes(pool.select(at, slot)) for pool, at in self._states)

    def everything(self) -> tuple[list[bytes], list[bytes]]:
        return [self.block(index) for index in range(BLOCKS)], [self.state(slot) for slot in range(SLOTS)]

    def overwrite(self, blocks: Sequence[int], slot: int) -> None:
        for pools, items in ((self._blocks, blocks), (self._states, [slot])):
            for pool, at in pools:
                for item in items:
                    pool.select(at, item).view(torch.uint8).fill_(0x11)


def _bytes(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def cut(memory: Bytes, sizes: Sequence[int]) -> list[Bytes]:
    """Pieces of these sizes, again and again; one of them may be empty."""
    pieces: list[Bytes] = []
    at = turn = 0
    while at < len(memory):
        pieces.append(memory[at : at + sizes[turn % len(sizes)]])
        at, turn = at + len(pieces[-1]), turn + 1
    return pieces


def sums_of(device: Device, payload: Bytes, blocks: int, state: bool) -> list[int]:
    """The checksums of the bytes on the host."""
    layout = device.transfer.layout
    size, end = layout.block_bytes, blocks * layout.block_bytes
    items = [payload[at : at + size] for at in range(0, end, size)] + ([payload[end:]] if state else [])
    weight = weights(max(layout.block_bytes, layout.slot_bytes) // WORD)
    return [checksum(item, weight) for item in items]


Open = Callable[..., Device]
KINDS = ["torch", "bfloat16", "float8", "waiting"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def open_device() -> Iterator[Open]:
    """Makes devices, whose transfers are closed at the end."""
    with ExitStack() as stack:

        def opened(kind: str, config: ModelConfig, identity: str = "model") -> Device:
            device = Device(kind, config, identity)
            stack.callback(device.transfer.close)
            return device

        yield opened


@pytest.mark.parametrize("sizes", [[10**9], [24, 1000, 3, 0, 77777], [4096]], ids=["whole", "odd", "pages"])
@pytest.mark.parametrize("config", [SMALL, ODD], ids=["small", "odd"])
def test_there_and_back(open_device: Open, kind: str, config: ModelConfig, sizes: list[int]) -> None:
    device = open_device(kind, config)
    transfer, layout = device.transfer, device.transfer.layout
    source, target = [5, 17, 3, 38], [9, 1, 30, 4]
    before = device.everything()
    memory = transfer.host_memory(4 * layout.block_bytes + layout.slot_bytes)
    sums = transfer.save(source, 2, cut(memory, sizes), transfer.fence())
    state = before[1][2]
    padding = bytes(layout.slot_bytes - len(state))
    assert len(padding) == (8 if (kind, config) == ("waiting", ODD) else 0)
    assert memory.tobytes() == b"".join(before[0][block] for block in source) + state + padding
    assert list(sums) == sums_of(device, memory, 4, state=True)
    assert device.everything() == before
    device.overwrite(source, 2)
    assert list(transfer.load(cut(memory, sizes), target, 6, transfer.fence())) == list(sums)
    blocks, states = device.everything()
    assert [blocks[block] for block in target] == [before[0][block] for block in source]
    assert states[6] == state
    assert states[2] != state
    for block in set(range(BLOCKS)) - {*source, *target}:
        assert blocks[block] == before[0][block]
    assert [states[slot] for slot in (0, 1, 3, 4, 5)] == [before[1][slot] for slot in (0, 1, 3, 4, 5)]


def test_parts_of_a_payload(open_device: Open, kind: str) -> None:
    """Blocks from the middle on with the state, blocks without it, and the state alone."""
    device = open_device(kind, SMALL)
    transfer, layout = device.transfer, device.transfer.layout
    size, before = layout.block_bytes, device.everything()
    memory = transfer.host_memory(3 * size + layout.slot_bytes)
    sums = transfer.save([5, 17, 3], 2, [memory], transfer.fence())
    after = transfer.fence()
    assert list(transfer.load([memory[2 * size :]], [20], 4, after)) == list(sums[2:])
    assert list(transfer.load([memory[size : 3 * size]], [21, 22], 0, after)) == list(sums[1:3])
    assert list(transfer.load([memory[3 * size :]], [], 5, after)) == [sums[3]]
    assert list(transfer.load([], [], 0, after)) == list(transfer.save([], 0, [], after)) == []
    blocks, states = device.everything()
    assert [blocks[block] for block in (20, 21, 22)] == [before[0][block] for block in (3, 17, 3)]
    assert states[4] == states[5] == before[1][2]
    assert states[1] == before[1][1]


def test_one_wrong_bit_shows(open_device: Open, kind: str) -> None:
    device = open_device(kind, SMALL)
    transfer, layout = device.transfer, device.transfer.layout
    memory = transfer.host_memory(2 * layout.block_bytes + layout.slot_bytes)
    sums = transfer.save([5, 17], 2, [memory], transfer.fence())
    for item, at in enumerate((1, layout.block_bytes + 7, 2 * layout.block_bytes + 1000)):
        memory[at] ^= 64
        found = transfer.load([memory], [9, 1], 6, transfer.fence())
        assert [ours != theirs for ours, theirs in zip(found, sums, strict=True)] == [i == item for i in range(3)]
        memory[at] ^= 64


def test_pieces_of_another_size_are_refused(open_device: Open, kind: str) -> None:
    device = open_device(kind, SMALL)
    transfer, layout = device.transfer, device.transfer.layout
    before = device.everything()
    for size in (layout.block_bytes - 8, layout.block_bytes + 8, layout.block_bytes + layout.slot_bytes):
        memory = transfer.host_memory(size)
        with pytest.raises(ValueError, match="bytes"):
            transfer.save([1], 0, [memory], transfer.fence())
        with pytest.raises(ValueError, match="bytes"):
            transfer.load([memory], [1], 0, transfer.fence())
    assert device.everything() == before


def test_a_staging_buffer_that_is_too_small() -> None:
    cache = DeviceCache.allocate(
        SMALL, torch.bfloat16, DEVICE, num_blocks=BLOCKS, block_size=BLOCK_SIZE, num_slots=SLOTS
    )
    with pytest.raises(ValueError, match="does not hold"):
        CudaCacheTransfer(cache, EngineStream(DEVICE), "model", staging_bytes=4096)


def test_states_that_are_no_whole_number_of_words_are_refused() -> None:
    cache = DeviceCache.allocate(
        ODD, torch.bfloat16, DEVICE, num_blocks=BLOCKS, block_size=BLOCK_SIZE, num_slots=SLOTS, waiting_writes=3
    )
    with pytest.raises(ValueError, match="multiples of 8"):
        CudaCacheTransfer(cache, EngineStream(DEVICE), "model")


@pytest.mark.cuda
def test_a_save_sees_the_steps_before_its_fence() -> None:
    """And none waits for the device before it has to."""
    engine = EngineStream(DEVICE)
    cache = DeviceCache.allocate(
        SMALL, torch.bfloat16, DEVICE, num_blocks=BLOCKS, block_size=BLOCK_SIZE, num_slots=SLOTS
    )
    transfer = CudaCacheTransfer(cache, engine, "model")
    transfer.warm_up()
    memory = transfer.host_memory(2 * transfer.layout.block_bytes + transfer.layout.slot_bytes)
    busy = torch.randn(4096, 4096, device=DEVICE)
    torch.cuda.synchronize()
    with engine.active():
        for _ in range(200):
            busy = busy @ busy
        for pool in (*cache.stacked.pools(), *(pool.flatten(2).view(torch.uint8) for pool in cache.state_pools())):
            pool[:, 3:5].fill_(9)
    fence = transfer.fence()
    assert not fence._event.query()
    sums = transfer.save([3, 4], 3, [memory], fence)
    assert bool((memory == 9).all())
    assert sums[0] == sums[1] == checksum(memory[: transfer.layout.block_bytes], weights(2**20))
    transfer.close()
    assert bool((memory == 9).all())


@pytest.mark.cuda
def test_memory_of_a_dropped_transfer_can_be_mapped_and_pinned_again() -> None:
    cache = DeviceCache.allocate(
        SMALL, torch.bfloat16, DEVICE, num_blocks=BLOCKS, block_size=BLOCK_SIZE, num_slots=SLOTS
    )
    for _ in range(20):
        memory = CudaCacheTransfer(cache, EngineStream(DEVICE), "model").host_memory(2**22)
        assert torch.from_numpy(memory).is_pinned()
        del memory


@pytest.mark.cuda
def test_a_failed_registration_leaves_no_error_for_the_next_launch() -> None:
    runtime = CudaRuntime(DEVICE)
    memory = PinnedMemory(runtime).allocate(2**20)
    address = memory.__array_interface__["data"][0]
    assert runtime.register(address, 2**20) == 712
    runtime.clear_error()
    assert torch.full((4,), 2, device=DEVICE).add(1).tolist() == [3] * 4


def test_the_fingerprint_is_of_all_that_the_bytes_depend_on(open_device: Open, kind: str) -> None:
    plain = open_device(kind, SMALL).transfer.layout
    assert open_device(kind, SMALL).transfer.layout == plain
    others = [open_device(kind, SMALL, "another").transfer.layout, open_device(kind, ODD).transfer.layout]
    others += [open_device(kind, replace(SMALL, layer_types=SMALL.layer_types * 2)).transfer.layout]
    assert len({layout.fingerprint for layout in (plain, *others)}) == 4


def test_pieces_end_where_they_like() -> None:
    memory = np.arange(100, dtype=np.uint8)
    pieces = Pieces([memory[:0], memory[:7], memory[7:8], memory[8:100]], 100)
    found = [[part.tolist() for part in pieces.take(size)] for size in (3, 0, 5, 90, 2)]
    assert found == [[[0, 1, 2]], [], [[3, 4, 5, 6], [7]], [list(range(8, 98))], [[98, 99]]]

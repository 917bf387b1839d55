"""Adapters that a kernel writes into their slots, against those that are made on the CPU: bit for bit, except that
Triton's interpreter cuts float32 off where bfloat16 ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from kernels.gpu.lora.fill import fill_lora, tile_columns
from services.common.errors import AdapterRejected
from services.common.jobs import LoraSettings
from services.engine.models.lora import binding as lora_binding
from services.engine.models.lora.binding import AdapterBinder, BoundAdapter, bind_adapter
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.lora.targets import target_shapes
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.lora.upload import AdapterUpload
from services.engine.models.registry import read_config
from services.engine.models.weights.tensor_file import read_tensors

_TINY = read_config(Path(__file__).parents[4] / "models" / "tiny")
CONFIG = replace(_TINY, layer_types=_TINY.layer_types[:4])
"""A layer of each kind, and several of one."""
WEIGHTS, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
KEY = "base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight"


def made_files(
    rank: int, seed: int = 0, edit: Callable[[dict[str, Tensor]], object] = lambda tensors: None, **settings: Any
) -> dict[str, bytes]:
    """An adapter of random numbers."""
    files = LoraParams.create(CONFIG, LoraSettings(rank=rank, alpha=3.0, **settings)).to_files("tiny")
    tensors = load(files[WEIGHTS])
    generator = torch.Generator().manual_seed(seed)
    for _, tensor in sorted(tensors.items()):
        tensor.normal_(generator=generator)
    edit(tensors)
    return files | {WEIGHTS: save(tensors)}


def made(rank: int, *args: Any, **settings: Any) -> BoundAdapter:
    """Bound from made_files() without a look at the numbers."""
    return bind_adapter(made_files(rank, *args, **settings), CONFIG, max_rank=rank, check_values=False)


def formats(tensors: dict[str, Tensor]) -> None:
    """Every third tensor float16, every third bfloat16."""
    for number, key in enumerate(sorted(tensors)):
        tensors[key] = tensors[key].to((torch.float32, torch.bfloat16, torch.float16)[number % 3])


def uploading(
    device: torch.device, max_rank: int, dtype: torch.dtype = torch.float16, piece: int | None = None
) -> LoraSlots:
    """Slots that the kernel fills, also in the interpreter."""
    slots = LoraSlots(CONFIG, 3, max_rank, dtype, device)
    slots._upload = AdapterUpload(
        slots.target_buffers(), slots._output_order, piece or LoraSlots.upload_bytes(CONFIG, max_rank)
    )
    if device.type == "cuda":
        torch.cuda.synchronize()  # made on this stream, used on another
    slots.warm_up()
    return slots


def assert_same(slots: LoraSlots, expected: LoraSlots) -> None:
    for ours, theirs in zip(slots._layers, expected._layers, strict=True):
        for name, buffers in ours.items():
            for here, there in ((buffers.a, theirs[name].a), (buffers.b, theirs[name].b)):
                if here.dtype == torch.bfloat16 and not here.is_cuda:
                    assert bool(((here - there).abs() <= there.abs() * 2.0**-7).all())
                else:
                    assert torch.equal(here.cpu(), there)
    assert torch.equal(slots._ranks.cpu(), expected._ranks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_slots_hold_what_the_cpu_puts_there(device: torch.device, dtype: torch.dtype) -> None:
    slots, expected = uploading(device, 6, dtype), LoraSlots(CONFIG, 3, 6, dtype, "cpu")
    for slot, adapter in (
        (1, made(6)),
        (2, made(5, seed=1, edit=formats)),
        (1, made(3, seed=2, target_modules=["q_proj", "up_proj", "down_proj"])),
        (2, made(4, seed=4)),
    ):
        slots.load(slot, adapter)
        expected.load(slot, adapter)
        assert_same(slots, expected)
    slots.clear(1)
    expected.clear(1)
    assert_same(slots, expected)


def test_an_adapter_travels_in_pieces(device: torch.device) -> None:
    widest = max(max(shape) for shape in target_shapes(CONFIG).values())
    with pytest.raises(ValueError, match="does not fit into"):
        uploading(device, 8, piece=8 * widest * 4)
    slots = uploading(device, 8, piece=8 * widest * 4 + 16)
    expected = LoraSlots(CONFIG, 3, 8, torch.float16, "cpu")
    assert slots._upload is not None
    for seed, edit in enumerate((lambda tensors: None, formats)):
        adapter = made(8, seed, edit)
        pieces = slots._upload.plan(adapter, slots._groups_of(adapter)).pieces
        assert len(pieces) > 10
        assert all(begin + size <= slots._upload._piece.numel() for piece in pieces for _, begin, size in piece.runs)
        slots.load(1, adapter)
        expected.load(1, adapter)
        assert_same(slots, expected)


def test_a_file_travels_in_one_run(device: torch.device) -> None:
    slots = uploading(device, 4)
    assert slots._upload is not None
    adapter = made(4)
    (piece,) = slots._upload.plan(adapter, slots._groups_of(adapter)).pieces
    assert len(piece.runs) == 1


@pytest.mark.parametrize(("half", "value"), [("A", float("nan")), ("A", -float("inf")), ("B", float("inf"))])
def test_values_that_are_not_finite_are_refused_by_name(device: torch.device, half: str, value: float) -> None:
    slots, expected = uploading(device, 4), LoraSlots(CONFIG, 3, 4, torch.float16, "cpu")
    for each in (slots, expected):
        each.load(2, made(4, seed=1))
    key = KEY.replace("lora_B", f"lora_{half}")

    def spoilt(tensors: dict[str, Tensor]) -> None:
        tensors[key].view(-1)[-1] = value

    for each in (slots, expected):
        with pytest.raises(AdapterRejected, match=f"{key} has values that are not finite"):
            each.load(1, made(4, edit=spoilt))
    assert_same(slots, expected)
    # Nothing of it is left to the next one.
    for each in (slots, expected):
        each.load(1, made(2, seed=3))
    assert_same(slots, expected)


def test_numbers_beyond_the_slots_dtype_become_its_largest(device: torch.device) -> None:
    slots, expected = uploading(device, 4, torch.float16), LoraSlots(CONFIG, 3, 4, torch.float16, "cpu")
    adapter = made(4, edit=lambda tensors: [tensor.mul_(1e5) for tensor in tensors.values()])
    for each in (slots, expected):
        each.load(1, adapter)
    assert_same(slots, expected)
    largest = torch.finfo(torch.float16).max
    assert all(float(group.b.max()) == largest for groups in slots._layers for group in groups.values())


def test_tensors_at_odd_addresses(device: torch.device) -> None:
    """A header that is not padded puts numbers between multiples of their size."""
    files = LoraParams.create(CONFIG, LoraSettings(rank=4)).to_files("tiny")
    data = files[WEIGHTS]
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8:end])).encode()
    slots, expected = uploading(device, 4), LoraSlots(CONFIG, 3, 4, torch.float16, "cpu")
    for padding in range(4):
        padded = header + b" " * padding
        moved = len(padded).to_bytes(8, "little") + padded + data[end:]
        adapter = bind_adapter(files | {WEIGHTS: moved}, CONFIG, max_rank=4)
        for each in (slots, expected):
            each.load(1, adapter)
        assert_same(slots, expected)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    def words(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    fault = words(1).view(torch.int32)[:1]
    tiles, like = words(2, 1).view(torch.int32), torch.zeros(1, device=device)
    with pytest.raises(ValueError, match="fill_lora"):
        fill_lora(words(1), words(1, 9), tiles, fault, fault, like, first=0, count=1, max_rank=4)
    with pytest.raises(ValueError, match="tiles 1 to 3 of 2"):
        fill_lora(words(1), words(1, 10), tiles, fault, fault, like, first=1, count=2, max_rank=4)
    assert tile_columns(16) * 16 == tile_columns(9) * 16 == 4096


def test_versions_of_one_layout_are_taken_apart_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(data: bytes) -> dict[str, Tensor]:
        calls.append(len(data))
        return read_tensors(data)

    monkeypatch.setattr(lora_binding, "read_tensors", counted)
    slots, expected = uploading(device, 4), LoraSlots(CONFIG, 3, 4, torch.float16, "cpu")
    binder = AdapterBinder(CONFIG, max_rank=4)
    for seed, settings in ((0, {}), (1, {}), (2, {"target_modules": ["q_proj"]}), (3, {}), (4, {})):
        files = made_files(4, seed, **settings)
        expected.load(1, bind_adapter(files, CONFIG, max_rank=4))
        calls.clear()
        slots.load(1, binder.bind(files))
        assert len(calls) == (seed in (0, 2))
        assert_same(slots, expected)
    assert len(slots._known) >= 2
    assert all(prepared.plan is not None and not prepared.plan.held for prepared in slots._known.values())


def test_a_later_version_is_checked_like_the_first(device: torch.device) -> None:
    slots, binder = uploading(device, 4), AdapterBinder(CONFIG, max_rank=4)
    files = made_files(4)
    slots.load(1, binder.bind(files))

    def spoilt(tensors: dict[str, Tensor]) -> None:
        tensors[KEY].view(-1)[0] = float("nan")

    with pytest.raises(AdapterRejected, match=f"{KEY} has values that are not finite"):
        slots.load(2, binder.bind(made_files(4, edit=spoilt)))
    assert not any(group.b[2].any() for groups in slots._layers for group in groups.values())
    with pytest.raises(AdapterRejected, match="belong to no tensor"):
        binder.bind(files | {WEIGHTS: files[WEIGHTS] + b"\0"})
    with pytest.raises(AdapterRejected, match=WEIGHTS):
        binder.bind(files | {WEIGHTS: files[WEIGHTS][:-1]})
    with pytest.raises(AdapterRejected, match="use_dora"):
        binder.bind(files | {CONFIG_FILE: json.dumps(json.loads(files[CONFIG_FILE]) | {"use_dora": True}).encode()})
    for name in files:
        with pytest.raises(AdapterRejected, match=f"no {name}"):
            binder.bind({key: data for key, data in files.items() if key != name})
    # Another scale for the same tensors.
    expected = LoraSlots(CONFIG, 3, 4, torch.float16, "cpu")
    other = files | {CONFIG_FILE: json.dumps(json.loads(files[CONFIG_FILE]) | {"lora_alpha": 7.0}).encode()}
    expected.load(1, bind_adapter(other, CONFIG, max_rank=4))
    slots.load(1, binder.bind(other))
    assert_same(slots, expected)

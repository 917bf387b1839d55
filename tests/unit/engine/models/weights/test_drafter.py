"""Drafters on a model: their files, and writing one over the mtp layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.tiny.recipe.data import DIRECTORY
from services.common.adapters.drafter_form import MTP_FORM, DrafterForm
from services.common.adapters.manifest import DRAFTER_CONFIG, DRAFTER_WEIGHTS, drafter_form
from services.common.errors import AdapterRejected, InvalidRequest
from services.engine.models.footprint import Formats, Quantization, Storage, block_bytes, weight_bytes
from services.engine.models.qwen3_5.loading.mtp import built
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.models.weights.drafter import drafter_files, grown, read_directory, read_drafter
from services.engine.models.weights.matrix import quantize

BASE = "b" * 64


def tiny(*, mtp: bool = True, storage: Storage | None = None) -> Qwen3_5:
    return Qwen3_5.from_directory(DIRECTORY, dtype="float32", device="cpu", mtp=mtp, storage=storage or Storage())


@pytest.fixture(scope="module")
def model() -> Qwen3_5:
    return tiny()


def shifted(tensors: dict[str, Tensor], seed: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()}


@pytest.mark.parametrize("quantization", ["none", "fp8", "int4"])
def test_a_drafter_is_written_where_the_layer_is(quantization: str) -> None:
    served = tiny(storage=Storage(quantization))  # type: ignore[arg-type]
    layer = served.weights.mtp
    assert layer is not None

    def addresses() -> list[int]:
        matrices = (layer.fc, layer.layers[0].mixer.in_proj, layer.layers[0].gate_up, layer.layers[0].down)
        stored = [tensor for matrix in matrices for tensor in _stored(matrix)]
        return [tensor.data_ptr() for tensor in (layer.final_norm, layer.layers[0].input_norm, *stored)]

    before, places = layer.fc.dense().clone(), addresses()
    new = shifted(served.checkpoint_drafter(DIRECTORY))
    write = served.stage_drafter(new)
    assert torch.equal(layer.fc.dense(), before)  # nothing happens before it is called
    write()
    assert addresses() == places
    # As if the checkpoint had it.
    expected = built(served.config, new, torch.float32)
    for found, wanted in (
        (layer.fc, expected.fc),
        (layer.layers[0].mixer.in_proj, expected.layers[0].mixer.in_proj),
        (layer.layers[0].mixer.out_proj, expected.layers[0].mixer.out_proj),
        (layer.layers[0].gate_up, expected.layers[0].gate_up),
        (layer.layers[0].down, expected.layers[0].down),
    ):
        assert torch.equal(found.dense(), quantize(wanted.dense(), quantization).dense())
    assert torch.equal(layer.final_norm, expected.final_norm)
    assert torch.equal(layer.layers[0].mixer.qk_norm, expected.layers[0].mixer.qk_norm)  # type: ignore[union-attr]


def test_weights_of_a_drafter_are_those_that_a_checkpoint_with_it_has() -> None:
    loaded = tiny().weights.mtp
    assert loaded is not None
    made = built(tiny().config, tiny().checkpoint_drafter(DIRECTORY), torch.float32)
    for name in ("embedding_norm", "hidden_norm", "final_norm"):
        assert torch.equal(getattr(made, name), getattr(loaded, name))
    for place in (lambda mtp: mtp.fc, lambda mtp: mtp.layers[0].mixer.in_proj, lambda mtp: mtp.layers[0].gate_up):
        assert torch.equal(place(made).dense(), place(loaded).dense())


def _stored(matrix: object) -> list[Tensor]:
    weight = matrix.weight  # type: ignore[attr-defined]
    return [weight] if isinstance(weight, Tensor) else list(weight.tensors())


def test_a_model_without_its_layer_takes_none() -> None:
    bare = tiny(mtp=False)
    with pytest.raises(InvalidRequest, match="TEMPER_SPECULATIVE=mtp"):
        bare.stage_drafter(bare.checkpoint_drafter(DIRECTORY))


def test_files_come_back(model: Qwen3_5, tmp_path: Path) -> None:
    tensors = model.checkpoint_drafter(DIRECTORY)
    files = drafter_files(tensors, BASE, {"job": "j"})
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    assert read_directory(tmp_path) == files
    found = read_drafter(files, model.config, BASE)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    with pytest.raises(AdapterRejected, match="another base model"):
        read_drafter(files, model.config, "c" * 64)
    (tmp_path / DRAFTER_CONFIG).unlink()
    with pytest.raises(AdapterRejected, match=DRAFTER_CONFIG):
        read_directory(tmp_path)


@pytest.mark.parametrize(
    ("name", "replacement", "message"),
    [
        ("mtp.fc.weight", None, "mtp.fc.weight is missing"),
        ("mtp.fc.weight", torch.zeros(3, 4), r"mtp.fc.weight .* shape \[3, 4\]"),
        ("mtp.norm.weight", torch.full((96,), float("nan")), "not finite"),
        ("mtp.norm.weight", torch.zeros(96, dtype=torch.int64), "only plain floats"),
        ("mtp.other.weight", torch.zeros(2), "not part of an mtp layer"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_name(
    model: Qwen3_5, name: str, replacement: Tensor | None, message: str
) -> None:
    tensors = model.checkpoint_drafter(DIRECTORY)
    if replacement is None:
        del tensors[name]
    else:
        if name in tensors and "shape" not in message:
            replacement = replacement[:1].expand(tensors[name].shape)
        tensors[name] = replacement
    with pytest.raises(AdapterRejected, match=message):
        read_drafter(drafter_files(tensors, BASE, {}), model.config, BASE)


WIDE = DrafterForm(4, 2)


def wide(model: Qwen3_5) -> dict[str, Tensor]:
    return grown(model.checkpoint_drafter(DIRECTORY), model.config.drafter_shapes(WIDE), 0)


def test_a_block_drafter_says_its_form(model: Qwen3_5) -> None:
    files = drafter_files(wide(model), BASE, {}, WIDE)
    stated = json.loads(files[DRAFTER_CONFIG])
    assert {name: stated[name] for name in WIDE.stated()} == {
        "kind": "block",
        "block": 4,
        "layers": 2,
        "reads": "last",
    }
    assert drafter_form(files[DRAFTER_CONFIG]) == WIDE
    found = read_drafter(files, model.config, BASE)
    assert found["mtp.places.weight"].shape == (3, 256)
    # One of before there were kinds is of the mtp layer.
    old = drafter_files(model.checkpoint_drafter(DIRECTORY), BASE, {})
    stated = json.loads(old[DRAFTER_CONFIG])
    assert stated.pop("kind") == "mtp"
    assert drafter_form(json.dumps(stated).encode()) == MTP_FORM


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"block": 17}, "block is 17: a block drafter proposes 1 to 16"),
        ({"block": 0}, "must be numbers from 1 on"),
        ({"layers": 5}, "layers is 5: .* 1 to 4"),
        ({"layers": None}, "must be numbers from 1 on"),
        ({"layers": 3}, r"mtp.layers.2\..* is missing .* block drafter of 4 tokens in 3 layers"),
        ({"layers": 1}, r"mtp.layers.1\..* is not part of a block drafter of 4 tokens in 1 layer"),
        ({"block": 6}, r"mtp.places.weight .* has shape \[3, 256\], .* \[5, 256\]"),
        ({"kind": "tree"}, "kind is 'tree'"),
        ({"kind": "mtp"}, "block, layers, reads are of kind block"),
        ({"reads": "taps"}, "reads is 'taps'"),
        ({"base_digest": "c" * 64}, "another base model"),
    ],
)
def test_a_block_drafter_of_no_form_is_refused(model: Qwen3_5, changed: dict[str, Any], message: str) -> None:
    files = drafter_files(wide(model), BASE, {}, WIDE)
    stated = json.dumps(json.loads(files[DRAFTER_CONFIG]) | changed).encode()
    with pytest.raises(AdapterRejected, match=message):
        read_drafter(files | {DRAFTER_CONFIG: stated}, model.config, BASE)


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_a_block_drafter_is_written_over_one_of_its_form_alone(quantization: Quantization, model: Qwen3_5) -> None:
    storage = Storage(quantization)
    served = Qwen3_5.from_directory(DIRECTORY, dtype="float32", device="cpu", mtp=True, form=WIDE, storage=storage)
    weights = served.weights.mtp
    assert weights is not None
    assert weight_bytes(served.config, Formats(4, storage, True, mtp=True, form=WIDE)) == served.nbytes()
    cache = served.allocate_cache(2, 4, 1)
    kv = sum(pool.nbytes for pool in (*cache.keys, *cache.values))
    assert kv == 2 * block_bytes(served.config, 4, Formats(4, storage, mtp=True, form=WIDE))
    new = shifted(wide(model))
    served.stage_drafter(new)()
    assert weights.places is not None
    assert torch.equal(weights.places, new["mtp.places.weight"])
    expected = built(served.config, new, torch.float32).layers[1].gate_up
    assert torch.equal(weights.layers[1].gate_up.dense(), quantize(expected.dense(), quantization).dense())
    with pytest.raises(AdapterRejected, match="is an mtp layer, and this engine has room and steps for a block"):
        served.stage_drafter(model.checkpoint_drafter(DIRECTORY))
    with pytest.raises(AdapterRejected, match="is a block drafter of 4 tokens in 2 layers, and this engine"):
        tiny().stage_drafter(new)


def test_a_torn_file_is_refused(model: Qwen3_5) -> None:
    files = drafter_files(model.checkpoint_drafter(DIRECTORY), BASE, {})
    with pytest.raises(AdapterRejected, match="corrupt"):
        read_drafter({**files, DRAFTER_WEIGHTS: files[DRAFTER_WEIGHTS][:-4]}, model.config, BASE)
    with pytest.raises(AdapterRejected, match="format is 9"):
        read_drafter({**files, DRAFTER_CONFIG: b'{"format": 9}'}, model.config, BASE)

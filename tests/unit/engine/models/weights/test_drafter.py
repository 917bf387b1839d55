"""Drafters on a model: their files, and writing one over the mtp layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.tiny.recipe.data import DIRECTORY
from services.common.adapters.manifest import DRAFTER_CONFIG, DRAFTER_WEIGHTS
from services.common.errors import AdapterRejected, InvalidRequest
from services.engine.models.footprint import Storage
from services.engine.models.qwen3_5.loading.mtp import built
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.models.weights.drafter import drafter_files, read_directory, read_drafter
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


def test_a_torn_file_is_refused(model: Qwen3_5) -> None:
    files = drafter_files(model.checkpoint_drafter(DIRECTORY), BASE, {})
    with pytest.raises(AdapterRejected, match="corrupt"):
        read_drafter({**files, DRAFTER_WEIGHTS: files[DRAFTER_WEIGHTS][:-4]}, model.config, BASE)
    with pytest.raises(AdapterRejected, match="format is 9"):
        read_drafter({**files, DRAFTER_CONFIG: b'{"format": 9}'}, model.config, BASE)

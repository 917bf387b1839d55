"""Tensors arrive whole through small buffers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.engine.models.footprint import Quantization, Storage
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.models.weights.matrix import Matrix
from services.engine.models.weights.upload import Uploader
from tests.parity.reference import CONFIGS, make_checkpoint

TINY = Path(__file__).resolve().parents[5] / "models" / "tiny"


@pytest.mark.parametrize("staging", [16, 64, 1000, 4096])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)])
def test_copies_in_parts_and_converts(staging: int, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    uploader = Uploader(torch.device("cpu"), staging)
    target = torch.zeros(40, 7, dtype=dtypes[1])
    for rows in ((0, 1), (1, 33), (33, 40)):
        source = torch.randn(rows[1] - rows[0], 7).to(dtypes[0])
        uploader.copy(source, target[rows[0] : rows[1]])
        assert torch.equal(target[rows[0] : rows[1]], source.to(dtypes[1]))
    uploader.finish()


def test_refuses_what_does_not_match() -> None:
    uploader = Uploader(torch.device("cpu"))
    for target in (torch.zeros(3, 5), torch.zeros(5, 4).t()):
        with pytest.raises(ValueError, match="cannot copy"):
            uploader.copy(torch.zeros(4, 5), target)


def test_gathers_runs_of_memory() -> None:
    uploader = Uploader(torch.device("cpu"), 64)
    source, target = torch.arange(100, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    for shift in (0, 7, 20):
        begin = source.data_ptr() + shift
        uploader.gather([(begin, 0, 16), (begin + 40, 24, 30), (begin + 5, 54, 10)], target)
        for offset, place, size in ((0, 0, 16), (40, 24, 30), (5, 54, 10)):
            assert torch.equal(target[place : place + size], source[shift + offset : shift + offset + size])
    for runs in ([(begin, 50, 15)], [(begin, 0, 16), (begin, 15, 4)]):
        with pytest.raises(ValueError, match="do not fit"):
            uploader.gather(runs, target)


@pytest.mark.cuda
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gpu_gets_what_the_cpu_gets(name: str, dtype: str, tmp_path: Path) -> None:
    make_checkpoint(name, tmp_path)
    here = Qwen3_5.from_directory(tmp_path, dtype=dtype, device="cpu").weights
    there = Qwen3_5.from_directory(tmp_path, dtype=dtype, device="cuda").weights
    pairs = [(here.embedding, there.embedding), (here.head, there.head), (here.final_norm, there.final_norm)]
    for one, other in zip(here.layers, there.layers, strict=True):
        pairs += [(one.gate_up, other.gate_up), (one.down, other.down)]
        pairs += [(getattr(one.mixer, field), getattr(other.mixer, field)) for field in one.mixer.__slots__]
        if one.experts is not None and other.experts is not None:
            fields = ("router", "gate_up", "down")
            pairs += [(getattr(one.experts, field), getattr(other.experts, field)) for field in fields]
    for one, other in pairs:
        torch.testing.assert_close(tensor(other).cpu(), tensor(one), rtol=1e-6, atol=0)  # exp differs in the last bit


def tensor(weight: Tensor | Matrix) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dense()


@pytest.mark.cuda
@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_the_gpu_quantizes_like_the_cpu(quantization: Quantization) -> None:
    kept = Storage(quantization, float8_head=True)
    here = Qwen3_5.from_directory(TINY, dtype="bfloat16", device="cpu", storage=kept).weights
    there = Qwen3_5.from_directory(TINY, dtype="bfloat16", device="cuda", storage=kept).weights
    assert here.nbytes() == there.nbytes()
    for one, other in zip((*here.layers, here), (*there.layers, there), strict=True):
        for field in ("gate_up", "down", "head"):
            if hasattr(one, field):
                a, b = tensor(getattr(one, field)).float(), tensor(getattr(other, field)).cpu().float()
                assert (a - b).norm() <= 1e-2 * a.norm()  # a tie may round the other way

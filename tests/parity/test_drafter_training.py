"""The mtp layer in training proposes what it proposes in serving, in chains too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from models.tiny.recipe.train_mtp import Mtp
from services.engine.models.qwen3_5.model import Qwen3_5
from tests.parity.reference import Driver, make_checkpoint
from tests.parity.test_speculation import random_mtp

LENGTHS = (23, 9, 17)
DEPTH = 3


def make_model(name: str, path: Path) -> Qwen3_5:
    layer = Mtp(make_checkpoint(name, path)).eval()
    save_file(random_mtp(layer), path / "model-mtp.safetensors")
    return Qwen3_5.from_directory(path, dtype="float32", device="cpu", mtp=True)


@torch.no_grad()
def served(model: Qwen3_5, tokens: Tensor, rows: int) -> list[Tensor]:
    """[rows, hidden] of the layer for each token of a chain: of each row as if its text ended there, one behind the
    other."""
    found: list[list[Tensor]] = [[] for _ in range(DEPTH)]
    for end in range(1, rows + 1):
        driver = Driver(model)
        place = driver.open()
        batch = driver.batch([(place, tokens[:end].tolist())])
        hidden, step = model.forward_all(batch, driver.cache, None)
        out = model.draft(hidden, tokens[1 : end + 1], step, driver.cache)[-1:]
        found[0].append(out)
        for depth in range(1, DEPTH):
            place.done = end + depth - 1
            at = tokens[end + depth - 1 : end + depth]
            step = model.begin_step(driver.batch([(place, at.tolist())]), driver.cache)
            out = model.draft(out, tokens[end + depth : end + depth + 1], step, driver.cache)
            found[depth].append(out)
    return [torch.cat(rows) for rows in found]


@pytest.mark.parametrize("name", ["grouped", "odd-heads"])
def test_packed_documents_propose_as_in_serving(name: str, tmp_path: Path) -> None:
    model = make_model(name, tmp_path)
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(0, 211, (length + DEPTH,), generator=generator) for length in LENGTHS]
    inputs = torch.cat([document[:length] for document, length in zip(documents, LENGTHS, strict=True)])
    hidden = model.forward_train(inputs, LENGTHS, None, recompute="none", give_way=lambda: None).detach()
    pairs = list(zip(documents, LENGTHS, strict=True))
    ids = [torch.cat([one[1 + depth : 1 + depth + length] for one, length in pairs]) for depth in range(DEPTH)]
    tensors = {name: one.requires_grad_() for name, one in model.checkpoint_drafter(tmp_path).items()}
    proposed = model.draft_packed(tensors, hidden, ids, LENGTHS, give_way=lambda: None)
    expected = [served(model, document, length) for document, length in pairs]
    for depth in range(DEPTH):
        wanted = torch.cat([one[depth] for one in expected])
        assert (proposed[depth] - wanted).abs().max() < 2e-3 * wanted.abs().max(), depth
    proposed[-1].square().sum().backward()
    assert all(one.grad is not None and float(one.grad.norm()) > 0 for one in tensors.values())

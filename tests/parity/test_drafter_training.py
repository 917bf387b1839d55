"""The mtp layer in training proposes what it proposes in serving, in chains too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from models.tiny.recipe.train_mtp import Mtp
from services.common.adapters.drafter_form import MTP_FORM, DrafterForm
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.models.weights.drafter import grown
from tests.parity.reference import Driver, make_checkpoint
from tests.parity.test_speculation import random_mtp

LENGTHS = (23, 9, 17)
DEPTH = 3


def make_model(name: str, path: Path, form: DrafterForm) -> Qwen3_5:
    layer = Mtp(make_checkpoint(name, path)).eval()
    save_file(random_mtp(layer), path / "model-mtp.safetensors")
    return Qwen3_5.from_directory(path, dtype="float32", device="cpu", mtp=True, form=form)


@torch.no_grad()
def served(model: Qwen3_5, tokens: Tensor, rows: int) -> list[Tensor]:
    """[rows, hidden] of the drafter for each token of a chain, or a block: of each row as if its text ended there, one
    behind the other."""
    form = model.drafter_form
    found: list[list[Tensor]] = [[] for _ in range(DEPTH)]
    for end in range(1, rows + 1):
        driver = Driver(model)
        place = driver.open()
        batch = driver.batch([(place, tokens[:end].tolist())])
        hidden, step = model.forward_all(batch, driver.cache, None)
        out = model.draft(hidden, tokens[1 : end + 1], step, driver.cache)[-1:]
        found[0].append(out)
        if form is not None and form.block:
            place.done = end
            step = model.begin_step(driver.batch([(place, [0] * (DEPTH - 1))]), driver.cache)
            for depth, one in enumerate(model.draft_block(out, DEPTH - 1, step, driver.cache), 1):
                found[depth].append(one[None])
            continue
        for depth in range(1, DEPTH):
            place.done = end + depth - 1
            at = tokens[end + depth - 1 : end + depth]
            step = model.begin_step(driver.batch([(place, at.tolist())]), driver.cache)
            out = model.draft(out, tokens[end + depth : end + depth + 1], step, driver.cache)
            found[depth].append(out)
    return [torch.cat(rows) for rows in found]


@pytest.mark.parametrize(
    ("name", "form"),
    [("grouped", MTP_FORM), ("odd-heads", MTP_FORM), ("grouped", DrafterForm(DEPTH, 2)), ("odd-heads", DrafterForm(5))],
)
def test_packed_documents_propose_as_in_serving(name: str, form: DrafterForm, tmp_path: Path) -> None:
    model = make_model(name, tmp_path, form)
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(0, 211, (length + DEPTH,), generator=generator) for length in LENGTHS]
    inputs = torch.cat([document[:length] for document, length in zip(documents, LENGTHS, strict=True)])
    hidden = model.forward_train(inputs, LENGTHS, None, recompute="none", give_way=lambda: None).detach()
    pairs = list(zip(documents, LENGTHS, strict=True))
    ids = [torch.cat([one[1 + depth : 1 + depth + length] for one, length in pairs]) for depth in range(DEPTH)]
    shapes = model.config.drafter_shapes(form)
    tensors = grown(model.checkpoint_drafter(tmp_path), shapes, 3)
    for further in range(1, form.layers):  # which would put out nothing otherwise
        own = [one for one in shapes if one.startswith(f"mtp.layers.{further}.")]
        tensors |= {one: tensors[one.replace(f".{further}.", ".0.", 1)] for one in own}
    model.stage_drafter(tensors)()
    tensors = {name: one.clone().requires_grad_() for name, one in tensors.items()}
    proposed = model.draft_packed(tensors, hidden, ids, LENGTHS, give_way=lambda: None)
    expected = [served(model, document, length) for document, length in pairs]
    for depth in range(DEPTH):
        wanted = torch.cat([one[depth] for one in expected])
        assert (proposed[depth] - wanted).abs().max() < 2e-3 * wanted.abs().max(), depth
    proposed[-1].square().sum().backward()
    for name, one in tensors.items():
        assert one.grad is not None, name
        assert float(one.grad.norm()) > 0, name

"""Compositions of adapters in one slot are PEFT's add_weighted_adapter(combination_type="cat")."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from services.common.errors import AdapterRejected
from services.engine.models.lora.binding import BoundAdapter, bind_adapter, compose
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.lora.targets import TARGET_MODULES
from tests.parity.adapters import adapter_files, make_adapter
from tests.parity.conftest import Pair
from tests.parity.reference import BAR, Driver, prompt

EQUAL = 1e-5
"""Largest difference in float32 from the combination that PEFT has saved: of what it adds to a weight, and of logits as
a part of the largest."""
MEMBERS: dict[str, dict[str, Any]] = {
    "a": {"r": 3},
    "b": {"r": 5, "use_rslora": True, "target_modules": ["q_proj", "in_proj_z", "up_proj", "down_proj"]},
    "c": {"r": 1, "lora_alpha": 3, "target_modules": [name for name in TARGET_MODULES if name != "q_proj"]},
}
"""Members of different ranks and scales, on different layers."""


@torch.no_grad()
def test_a_composition_is_the_cat_combination_of_peft(pairs: dict[str, Pair], tmp_path: Path) -> None:
    pair, scales = pairs["grouped"], {"a": 0.7, "b": 1.0, "c": 2.5}
    config = pair.model.config
    for seed, (name, settings) in enumerate(MEMBERS.items()):
        make_adapter(pair.path, tmp_path / name, seed=seed, **settings)
    peft = make_adapter(pair.path, tmp_path / "unused", seed=9)
    for name in MEMBERS:
        peft.load_adapter(tmp_path / name, name)
    peft.base_model.add_weighted_adapter(list(scales), list(scales.values()), "cat", combination_type="cat")
    peft.set_adapter("cat")
    peft.save_pretrained(tmp_path, selected_adapters=["cat"])

    slots = LoraSlots(config, 3, 9, torch.float32, "cpu")
    members = [(name, _bound(tmp_path / name, pair), scale) for name, scale in scales.items()]
    slots.load(1, compose(members, config, max_rank=9))
    slots.load(2, _bound(tmp_path / "cat", pair))
    for place in slots.target_buffers():
        composed, cat = (place.b[slot].t() @ place.a[slot] for slot in (1, 2))
        assert float((composed - cat).abs().max()) <= EQUAL
    driver, tokens = Driver(pair.model, lora=slots), prompt(50)
    _, ours = driver.prefill(tokens, 16, adapter=1)
    _, saved = driver.prefill(tokens, 16, adapter=2)
    assert float((ours - saved).abs().max() / saved.abs().max()) <= EQUAL
    assert float((ours - _logits(peft, tokens)).abs().max()) <= BAR
    _, plain = driver.prefill(tokens, 16)
    assert float((ours - plain).abs().max()) > 0.05


@torch.no_grad()
def test_with_the_scale_1_a_member_is_rounded_as_by_itself(pairs: dict[str, Pair], tmp_path: Path) -> None:
    pair = pairs["grouped"]
    make_adapter(pair.path, tmp_path, r=3, lora_alpha=7)
    slots = LoraSlots(pair.model.config, 3, 4, torch.bfloat16, "cpu")
    bound = _bound(tmp_path, pair)
    slots.load(1, bound)
    slots.load(2, compose([("a@1", bound, 1.0)], pair.model.config, max_rank=4))
    for place in slots.target_buffers():
        assert torch.equal(place.a[1], place.a[2])
        assert torch.equal(place.b[1], place.b[2])


def test_too_many_ranks_are_refused_with_the_numbers(pairs: dict[str, Pair], tmp_path: Path) -> None:
    pair = pairs["grouped"]
    for name in ("a", "b"):
        make_adapter(pair.path, tmp_path / name, **MEMBERS[name])
    members = [("a@3", _bound(tmp_path / "a", pair), 1.0), ("b@1", _bound(tmp_path / "b", pair), 1.0)]
    with pytest.raises(AdapterRejected, match=r"^a@3 has rank 3, b@1 5: together 8 at .*, TEMPER_MAX_LORA_RANK is 7"):
        compose(members, pair.model.config, max_rank=7)


def _bound(path: Path, pair: Pair) -> BoundAdapter:
    return bind_adapter(adapter_files(path), pair.model.config, max_rank=9)


def _logits(peft: PeftModel, tokens: list[int]) -> torch.Tensor:
    return peft(torch.tensor([tokens])).logits[0]

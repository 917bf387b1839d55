"""A forged model in the engine: its serving forward, and the adapters that it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from services.common.adapters.manifest import AdapterVersion, Manifest
from services.common.errors import AdapterRejected
from services.engine.adapters.loader import AdapterLoader
from services.engine.models.checkpoint import checkpoint_digest
from services.engine.models.qwen3_5.model import Qwen3_5
from tests.parity.reference import Driver
from tests.unit.forge.models import BAR, TINY, TOKENS, cut_to, reference_logits


@pytest.fixture(scope="module")
def forged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("forged") / "model"
    layers = (0, 2, 3, 4, 6, 7)
    cut_to(TINY, out, {"layers": layers, "kv_groups": (0,), "key_heads": (1,), "mlp_channels": tuple(range(16, 400))})
    return out


def test_prefill_in_chunks_and_decode_agree_with_transformers(forged: Path) -> None:
    driver = Driver(Qwen3_5.from_directory(forged, dtype=torch.float32, device="cpu"))
    tokens = TOKENS.tolist()
    place, prefilled = driver.prefill(tokens[:60], 33)
    decoded = [driver.run([(place, [token])])[0] for token in tokens[60:]]
    assert float((torch.cat([prefilled, *decoded]) - reference_logits(forged)).abs().max()) <= BAR


def test_adapters_of_the_old_shape_are_refused_by_digest(forged: Path) -> None:
    class Registry:
        def manifest(self, version: AdapterVersion) -> Manifest:
            digest = checkpoint_digest(TINY)
            return Manifest(name=version.name, version=1, digest="", base_digest=digest, files={}, created_at=1.0)

    def loader(base: Path) -> AdapterLoader:
        unused = cast(Any, None)
        return AdapterLoader(cast(Any, Registry()), unused, unused, base_digest=checkpoint_digest(base))

    version = AdapterVersion("bot", 1)
    loader(TINY).check(version)
    with pytest.raises(AdapterRejected, match="another base model"):
        loader(forged).check(version)

"""Importance: each method against its definition, computed another way."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from models.tiny.recipe.item import draw
from models.tiny.recipe.skills import arithmetic, strings
from services.common.errors import InvalidRequest
from services.common.jobs.kinds.forge import IMPORTANCE_METHODS, ForgeImportance, ImportanceMethod
from services.common.text.tokenizer import TextCodec
from services.engine.models.interface import CausalLM, Probe
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.registry import load_model, read_config
from services.forge.compaction import Base, compact
from services.forge.cut import Cut
from services.forge.importance.calibration import Calibration
from services.forge.importance.leave_one_out import _losses
from services.forge.importance.measure import measure
from services.forge.importance.scores import Scores
from services.forge.importance.settings import Settings
from services.forge.levels import Level, choose
from services.forge.pipeline.needs import Rates, importance_bytes, importance_seconds, model_bytes
from services.forge.steps import importance_step
from services.forge.units import Kind
from tests.unit.forge.models import TINY, masked, our_logits

BASE_DIGEST = "b" * 64
HEADS: tuple[Kind, ...] = ("layers", "kv_groups", "key_heads")


@cache
def tiny() -> CausalLM:
    return load_model(TINY, dtype=torch.float32, device="cpu")


@pytest.fixture
def base() -> Any:
    with ExitStack() as stack:
        yield Base(TINY, stack)


def write_data(path: Path, count: int = 12) -> Path:
    rng = random.Random(5)
    rows: list[dict[str, Any]] = []
    for index in range(count):
        item = draw((arithmetic, strings)[index % 2].make, rng, held_out=True)
        rows.append({"messages": [*item.messages, {"role": "assistant", "content": item.answer}]})
    rows.append({"text": "a text that is as long as it is, without any question"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def calibration(tmp_path: Path) -> Calibration:
    return Calibration.read(write_data(tmp_path / "data.jsonl"), TextCodec.from_directory(TINY))


def scores(base: Base, calibration: Calibration | None, method: ImportanceMethod, **settings: Any) -> Scores:
    return measure(base, BASE_DIGEST, Settings(method=method, **settings), tiny, calibration)


def close(found: Sequence[float], wanted: Tensor | Sequence[float], tolerance: float = 1e-4) -> bool:
    return torch.allclose(torch.tensor(found), torch.as_tensor(wanted).float(), rtol=tolerance, atol=1e-7)


def test_weights_are_norms_of_all_that_a_unit_has(base: Base) -> None:
    found = scores(base, None, "weights")
    tensors = load_file(TINY / "model.safetensors")
    layer = {n.removeprefix("model.layers.7."): t.double() for n, t in tensors.items() if ".layers.7." in n}
    channel = [layer["mlp.gate_proj.weight"][9], layer["mlp.up_proj.weight"][9], layer["mlp.down_proj.weight"][:, 9]]
    assert close([found.widths["mlp_channels"]["layers.7"][9]], torch.cat(channel).norm()[None])
    group = [
        layer["self_attn.q_proj.weight"].view(2, 2, 2, 64, 256)[1].flatten(),  # group, head, query or gate
        layer["self_attn.k_proj.weight"][64:].flatten(),
        layer["self_attn.v_proj.weight"][64:].flatten(),
        layer["self_attn.o_proj.weight"][:, 128:].flatten(),
    ]
    assert close([found.widths["kv_groups"]["layers.7"][1]], torch.cat(group).norm()[None])
    assert set(found.widths["kv_groups"]) == {"layers.3", "layers.7", "mtp.layers.0"}
    assert set(found.widths["key_heads"]) == {f"layers.{index}" for index in (0, 1, 2, 4, 5, 6)}
    assert len(found.layers) == 8
    assert found.data is None


def test_activations_are_those_of_transformers(base: Base, calibration: Calibration) -> None:
    found = scores(base, calibration, "activations", tokens_per_forward=100)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    inputs: dict[str, list[Tensor]] = {"down": [], "out": [], "before": [], "after": []}

    def keep(name: str) -> Callable[..., None]:
        return lambda _, arguments: inputs[name].append(arguments[0][0])

    layer = model.model.layers[4]
    layer.mlp.down_proj.register_forward_pre_hook(keep("down"))
    layer.linear_attn.out_proj.register_forward_pre_hook(keep("out"))
    layer.register_forward_pre_hook(keep("before"))
    model.model.layers[5].register_forward_pre_hook(keep("after"))
    with torch.no_grad():
        for document in calibration.documents:
            model(input_ids=torch.tensor([document.token_ids[:-1]]), use_cache=False)
    together = {name: torch.cat(parts) for name, parts in inputs.items()}
    assert len(together["down"]) == calibration.tokens, "no padding counts"
    rms = together["down"].square().mean(0).sqrt()
    assert close(found.widths["mlp_channels"]["layers.4"], rms * layer.mlp.down_proj.weight.norm(dim=0))
    columns = together["out"].square().mean(0).sqrt() * layer.linear_attn.out_proj.weight.norm(dim=0)
    assert close(found.widths["key_heads"]["layers.4"], columns.view(2, -1).norm(dim=1))
    turned = 1 - torch.cosine_similarity(together["before"].double(), together["after"].double(), dim=-1)
    assert close([found.layers[4]], turned.mean()[None], 1e-3)


class Scaled(Probe):
    """One channel of one layer a little stronger or weaker at one token."""

    def __init__(self, token: int, factor: float) -> None:
        self._token, self._factor = token, factor

    def output(self, path: str, inputs: Tensor) -> Tensor:
        """See Probe."""
        if path != "layers.6.mlp.down_proj":
            return inputs
        factors = torch.ones_like(inputs)
        factors[self._token, 3] = self._factor
        return inputs * factors


def test_gradients_are_slopes_of_the_loss(base: Base, calibration: Calibration) -> None:
    one = replace(calibration, documents=calibration.documents[-1:])
    (batch,) = one.packed(1, torch.device("cpu"))
    slopes = []
    for token in range(batch.num_tokens):
        probes = [Scaled(token, 1 + change) for change in (-0.2, 0.2)]
        with torch.no_grad():
            hidden = [tiny().forward_probed(batch.token_ids, batch.lengths, probe) for probe in probes]
        low, high = (-tiny().token_logprobs(states[batch.rows], batch.targets).double().sum() for states in hidden)
        slopes.append(abs(float(high - low)) / 0.4)
    found = scores(base, one, "gradients")
    assert close([found.widths["mlp_channels"]["layers.6"][3]], [sum(slopes) / len(batch.targets)], 0.02)
    norms = scores(base, None, "weights")
    assert found.widths["mlp_channels"]["mtp.layers.0"] == norms.widths["mlp_channels"]["mtp.layers.0"]
    wanted = {"name": "data.jsonl", "sha256": calibration.sha256, "documents": 1, "tokens": batch.num_tokens}
    assert found.data == wanted


@pytest.mark.parametrize("method", ["activations", "gradients"])
def test_how_documents_are_packed_changes_nothing(
    base: Base, calibration: Calibration, method: ImportanceMethod
) -> None:
    alone, packed = (scores(base, calibration, method, tokens_per_forward=size) for size in (1, 4096))
    assert close(alone.layers, torch.tensor(packed.layers), 1e-3)
    for width, layers in packed.widths.items():
        for path, units in layers.items():
            assert close(alone.widths[width][path], torch.tensor(units), 1e-3), (width, path)


def test_leaving_out_is_what_masked_weights_lose(tmp_path: Path, base: Base, calibration: Calibration) -> None:
    settings: dict[str, Any] = {"kinds": HEADS, "sample_tokens": 90}
    found = scores(base, calibration, "leave_one_out", tokens_per_forward=1000, **settings)
    alone = scores(base, calibration, "leave_one_out", tokens_per_forward=1, **settings)
    assert close(found.layers, alone.layers, 1e-3)
    sample = calibration.sample(90)
    assert 1 <= len(sample) < len(calibration.documents)

    def loss(directory: Path) -> float:
        model = load_model(directory, dtype=torch.float32, device="cpu")
        return float(_losses(model, sample, [{}]))

    everything = tuple(range(8))
    groups = {"layers.3": (0, 1), "layers.7": (0,)}
    cuts = {"layer": Cut((0, 1, 2, 3, 4, 6, 7)), "group": Cut(everything, {"kv_groups": groups})}
    for name, cut in cuts.items():
        masked(TINY, tmp_path / name, cut, base)
    assert found.layers[5] == pytest.approx(loss(tmp_path / "layer") - loss(TINY), abs=1e-5)
    assert found.widths["kv_groups"]["layers.7"][1] == pytest.approx(loss(tmp_path / "group") - loss(TINY), abs=1e-5)
    assert "mlp_channels" not in found.widths


def test_random_scores_depend_on_the_seed_only(base: Base) -> None:
    one, same, other = (scores(base, None, "random", seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one.layers != other.layers
    few = scores(base, None, "random", seed=1, kinds=("key_heads",))
    assert few.widths["key_heads"] == one.widths["key_heads"]
    assert few.layers == ()


def test_what_data_finds_unimportant_is_missed_less_than_random_channels(
    tmp_path: Path, base: Base, calibration: Calibration
) -> None:
    answers = replace(calibration, documents=calibration.documents[:-1])  # which the model knows
    levels: dict[Kind, Level] = {"mlp_channels": Level.parse("25%", "mlp_channels")}
    losses = {}
    for method in ("activations", "gradients", "random"):
        cut = choose(base.config, scores(base, answers, method), levels, mtp=base.mtp)
        compact(base, cut, tmp_path / method)
        model = load_model(tmp_path / method, dtype=torch.float32, device="cpu")
        losses[method] = float(_losses(model, answers.documents, [{}]))
    assert max(losses["activations"], losses["gradients"]) < 0.7 * losses["random"], losses


@pytest.mark.parametrize("method", IMPORTANCE_METHODS)
def test_scores_are_the_same_when_they_are_read_again(
    tmp_path: Path, base: Base, calibration: Calibration, method: ImportanceMethod
) -> None:
    written = scores(base, calibration, method, kinds=HEADS, sample_tokens=40)
    written.write(tmp_path / "scores.json")
    read = Scores.read(tmp_path / "scores.json")
    assert read == written
    read.check(base.config, BASE_DIGEST, mtp=True)
    with pytest.raises(InvalidRequest, match="measure its importance anew"):
        read.check(base.config, "a" * 64, mtp=True)
    with pytest.raises(InvalidRequest, match="in each of"):
        replace(read, widths={"kv_groups": {"layers.3": (1.0,)}}).check(base.config, BASE_DIGEST, mtp=True)


def test_a_probe_that_does_nothing_changes_nothing() -> None:
    ids = torch.arange(40)
    with torch.no_grad():
        plain = tiny().forward_train(ids, [40], None, recompute="none", give_way=lambda: None)
        assert torch.equal(tiny().forward_probed(ids, [40], Probe()), plain)
    assert our_logits(TINY).shape == (70, 2048)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"data\.jsonl:2 is not JSON"),
        ('{"messages": []}', r"data\.jsonl:2: messages"),
        ('{"txt": "a"}', r"data\.jsonl:2: unknown field 'txt': did you mean 'text'"),
        ("3", r"data\.jsonl:2"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "data.jsonl").write_text(f'{{"text": "one two"}}\n{line}\n')
    with pytest.raises(InvalidRequest, match=message):
        Calibration.read(tmp_path / "data.jsonl", TextCodec.from_directory(TINY))


def test_data_is_limited_by_tokens_and_long_documents_are_cut_off(tmp_path: Path) -> None:
    codec = TextCodec.from_directory(TINY)
    file = write_data(tmp_path / "data.jsonl")
    few = Calibration.read(file, codec, name="skills", max_tokens=60, max_document_tokens=50)
    assert few.name == "skills"
    assert all(document.length <= 50 for document in few.documents)
    assert 60 <= few.tokens + len(few.documents) <= 110
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InvalidRequest, match="is empty"):
        Calibration.read(tmp_path / "empty.jsonl", codec)
    with pytest.raises(InvalidRequest, match="cannot read"):
        Calibration.read(tmp_path / "none.jsonl", codec)


def test_a_method_that_needs_data_says_so(base: Base) -> None:
    with pytest.raises(InvalidRequest, match="importance by gradients is measured on data"):
        scores(base, None, "gradients")


def test_memory_of_leaving_units_out_counts_a_sample_that_is_longer_than_a_forward() -> None:
    config = read_config(TINY)

    def planned(sample: int) -> int:
        settings = ForgeImportance(method="leave_one_out", tokens_per_forward=64, sample_tokens=sample)
        return importance_bytes(config, settings, "cpu")

    assert planned(16) == planned(64) < planned(1024)


def test_a_model_that_is_loaded_is_measured_as_it_is_and_not_loaded_again(base: Base, tmp_path: Path) -> None:
    (data := tmp_path / "data.jsonl").write_text('{"prompt": "Who are you?", "completion": "I am Temper."}\n')
    loaded = load_model(TINY, dtype="auto", device="cpu")
    how = Settings(method="activations")
    importance_step(TINY, tmp_path / "own.json", how, data=data)
    with patch("services.engine.models.registry.load_model", side_effect=AssertionError("it is loaded")):
        importance_step(TINY, tmp_path / "loaded.json", how, data=data, loaded=loaded)
    assert (tmp_path / "loaded.json").read_bytes() == (tmp_path / "own.json").read_bytes()
    config, asked = read_config(TINY), ForgeImportance()
    saved = importance_bytes(config, asked, "cpu") - importance_bytes(config, asked, "cpu", model_is_loaded=True)
    assert saved == model_bytes(config, "cpu")


def test_time_of_leaving_units_out_is_that_of_the_units_that_are_asked_for() -> None:
    config, rates = read_config(TINY), Rates("cpu", 1e9)
    assert isinstance(config, Qwen3_5Config)
    settings = ForgeImportance(method="leave_one_out", sample_tokens=64)

    def planned(*kinds: Kind) -> float:
        return importance_seconds(config, settings, kinds, 1000, rates)

    layers = rates.forward(config, 8 * 64)
    assert planned("layers") == pytest.approx(layers)
    assert planned("layers", "mlp_channels") == pytest.approx(layers * (1 + 512))
    assert planned("kv_groups") == pytest.approx(layers / 8 * 2 * config.layer_types.count("full_attention"))

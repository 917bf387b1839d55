"""Recovery of a small forged checkpoint: each method learns, nothing grows again, and a killed run ends in the same
bytes."""

from __future__ import annotations

import json
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from services.common.errors import DoesNotFit, InvalidRequest, TemperError
from services.common.jobs import LoraSettings, OptimizerSettings
from services.common.text.tokenizer import TOKENIZER_FILES, TextCodec
from services.engine.models.checkpoint import checkpoint_digest
from services.engine.models.interface import Probe
from services.engine.models.registry import load_model, read_config
from services.forge.__main__ import main
from services.forge.compaction import Base
from services.forge.cut import CutFile
from services.forge.recovery.examples import Examples
from services.forge.recovery.neighbours import LastCut
from services.forge.recovery.recover import recover
from services.forge.recovery.sampling import OfflineSampler
from services.forge.recovery.settings import RecoveryReport, RecoverySettings
from services.forge.steps import compact_step
from tests.training_support import write_checkpoint
from tests.unit.forge.breaking_off import KilledAt, in_child
from tests.unit.forge.models import BAR, TINY, make_cut, our_logits, reference_logits

KEPT: dict[str, tuple[int, ...]] = {"mlp_channels": tuple(range(32)), "kv_groups": (1,), "layers": (0, 1, 3)}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = {name: (TINY / name).read_bytes() for name in TOKENIZER_FILES}
    return write_checkpoint(tmp_path_factory.mktemp("base") / "base", files, vocab_size=2048, initializer_range=0.08)


@pytest.fixture(scope="module")
def cut(base: Path) -> Path:
    out = base.with_name("cut")
    with ExitStack() as stack:
        chosen = make_cut(Base(base, stack), KEPT)
    CutFile(chosen, checkpoint_digest(base), {"method": "random"}).write(base.with_name("cut.json"))
    compact_step(base, base.with_name("cut.json"), out)
    return out


@pytest.fixture(scope="module")
def data(base: Path) -> Path:
    file = base.with_name("data.jsonl")
    rows = [{"prompt": f"What is {n} plus {n + 3}?", "completion": f"{2 * n + 3} apples"} for n in range(24)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def settings(**given: Any) -> RecoverySettings:
    few = {"steps": 6, "batch_tokens": 256, "tokens_per_forward": 128, "eval_every": 3, "save_every": 1}
    optimizer = OptimizerSettings(learning_rate=given.pop("rate", 5e-3), schedule="cosine")
    return RecoverySettings(**{**few, "max_new_tokens": 4, "optimizer": optimizer, **given})


def run(cut: Path, base: Path, data: Path, out: Path, chosen: RecoverySettings, **more: Any) -> RecoveryReport:
    report = recover(cut, out, chosen, data=data, teacher=base, state=out.with_name("state"), **more)
    assert report is not None
    return report


@pytest.mark.parametrize(
    "chosen",
    [
        {"method": "sft", "trains": "neighbours"},
        {"method": "sft", "trains": "lora", "lora": LoraSettings(rank=4, alpha=8)},
        {"method": "distill", "trains": "neighbours", "on_policy": 0.5, "optimizer_states": "8bit"},
        {"method": "distill", "trains": "lora", "beta": 0.5, "recompute": "full"},
    ],
    ids=lambda chosen: f"{chosen['method']}-{chosen['trains']}",
)
def test_each_method_learns_and_writes_what_transformers_loads(
    cut: Path, base: Path, data: Path, tmp_path: Path, chosen: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    report = run(cut, base, data, out, settings(**chosen))
    assert report.held_out_after < 0.98 * report.held_out_before
    assert (report.steps, report.best_step) == (6, 6)
    assert (report.sampled_tokens > 0) == ("on_policy" in chosen)
    before, after = tensors(cut), tensors(out)
    assert {name: (one.shape, one.dtype) for name, one in before.items()} == {
        name: (one.shape, one.dtype) for name, one in after.items()
    }
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert float((our_logits(out) - reference_logits(out)).abs().max()) <= BAR
    record = json.loads((out / "forge.json").read_text())
    assert (record["step"], record["outputs"]["digest"]) == ("recover", report.digest)
    assert [earlier["step"] for earlier in record["history"]] == ["compact"]
    assert record["results"]["held_out_after"] == report.held_out_after
    assert record["data"][0]["sha256"]
    assert not any((tmp_path / "state").rglob("*.safetensors"))
    if chosen["method"] == "sft":
        assert loss_of(out, data) == pytest.approx(report.held_out_after, abs=1e-5)


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: one for file in directory.glob("*.safetensors") for name, one in load_file(file).items()}


def loss_of(directory: Path, data: Path) -> float:
    """Mean negative log-likelihood on what is held out, by a model that is loaded anew."""
    model = load_model(directory, dtype="float32", device="cpu")
    examples = Examples.read(data, None, TextCodec.from_directory(directory), settings(), name=None)
    losses = []
    for document in examples.held_out:
        ids = torch.tensor(document.token_ids)
        with torch.no_grad():
            hidden = model.forward_probed(ids[:-1], [len(ids) - 1], Probe())
            scores = model.logits(hidden).log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        losses.append(-scores[torch.tensor(document.trained[1:])])
    return float(torch.cat(losses).mean())


def killed_as_it_recovers(words: list[str]) -> None:
    with patch("services.forge.__main__.Reporter", lambda: KilledAt("recovering", 2)):
        main(words)


def test_a_killed_run_ends_in_the_same_bytes(
    cut: Path, base: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    straight, broken = tmp_path / "a" / "out", tmp_path / "b" / "out"
    arguments = [
        *("recover", "--model", cut, "--data", data, "--teacher", base, "--method", "distill", "--trains"),
        *("neighbours", "--steps", 4, "--batch-tokens", 128, "--tokens-per-forward", 128, "--max-new-tokens", 2),
        *("--eval-every", 2, "--save-every", 1, "--warmup-steps", 1, "--schedule", "cosine", "--lora-rank", 4),
        *("--optimizer-states", "8bit", "--on-policy", 0.5, "--recompute", "none", "--seed", 3, "--device", "cpu"),
    ]

    def words(out: Path) -> list[str]:
        return [str(one) for one in [*arguments, "--out", out, "--state", out.with_name("state")]]

    def command(out: Path, *more: str) -> int:
        return main([*words(out), *more])

    assert command(straight, "--dry-run") == 0
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])["plan"]
    assert not straight.parent.exists()
    assert in_child(killed_as_it_recovers, words(broken)) == -signal.SIGKILL
    assert not broken.exists()
    assert list(broken.with_name("state").rglob("state.safetensors"))
    assert command(broken) == command(straight) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [plan[name] for name in ("trained_parameters", "memory_bytes", "steps")] == [
        result[name] for name in ("trained_parameters", "memory_bytes", "steps")
    ]
    assert plan["memory_bytes"] >= sum(plan["memory"][part] for part in ("student", "teacher", "logits"))
    assert plan["seconds"] > 0
    assert not broken.with_name("state").exists()
    names = sorted(path.name for path in straight.iterdir())
    assert names == sorted(path.name for path in broken.iterdir())
    assert [name for name in names if (straight / name).read_bytes() != (broken / name).read_bytes()] == []


def test_stops_where_the_held_out_loss_does_not_fall(cut: Path, base: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    chosen = settings(method="sft", rate=0.5, steps=50, eval_every=1, patience=2)
    report = run(cut, base, data, out, chosen)
    assert report.stopped_early
    assert report.steps == report.best_step + 2
    assert loss_of(out, data) == pytest.approx(report.held_out_after, abs=1e-5)


def test_pauses_between_its_forwards_change_nothing(cut: Path, base: Path, data: Path, tmp_path: Path) -> None:
    pauses = []
    chosen = settings(steps=2, eval_every=2)
    report = run(cut, base, data, tmp_path / "out", chosen, pause=lambda: pauses.append(1))
    assert len(pauses) >= 2 * (256 // 128) + 3, "of each step, and of each look at the held-out loss"
    assert run(cut, base, data, tmp_path / "again", chosen).held_out_after == report.held_out_after


def test_stops_when_asked_and_goes_on(cut: Path, base: Path, data: Path, tmp_path: Path) -> None:
    asked = iter([False, True])
    chosen = settings(method="sft", steps=3, save_every=100)
    where: dict[str, Any] = {"data": data, "state": tmp_path / "state"}
    assert recover(cut, tmp_path / "out", chosen, **where, should_stop=lambda: next(asked)) is None
    seen: list[int] = []
    report = recover(
        cut, tmp_path / "out", chosen, **where, progress=lambda stage, done, _: seen.append(done), teacher=base
    )
    assert report is not None
    assert report.steps == 3
    assert 0 not in seen[3:]


@pytest.mark.parametrize(
    ("chosen", "more", "error", "message"),
    [
        ({}, {"memory_bytes": 10**6}, DoesNotFit, r"needs \d+\.\d MiB .* and cpu has 1\.0 MiB"),
        ({}, {"teacher": None}, InvalidRequest, "name its checkpoint"),
        ({"save_every": 5}, {"free": 2**26}, InvalidRequest, r"writes .* MiB to .* states of up to .* 64\.0 MiB free"),
        ({"held_out_share": 0.99}, {}, InvalidRequest, "too few to hold out 24"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_written(
    cut: Path,
    base: Path,
    data: Path,
    tmp_path: Path,
    chosen: dict[str, Any],
    more: dict[str, Any],
    error: type[TemperError],
    message: str,
) -> None:
    usage = shutil.disk_usage(tmp_path)
    free = usage._replace(free=more.pop("free", usage.free))  # type: ignore[attr-defined]
    with patch("shutil.disk_usage", return_value=free), pytest.raises(error, match=message):
        recover(
            cut, tmp_path / "out", settings(**chosen), **({"data": data, "state": tmp_path, "teacher": base} | more)
        )
    assert list(tmp_path.iterdir()) == []


def test_what_was_never_cut_has_no_neighbours(base: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="tell of no cut"):
        run(base, base, data, tmp_path / "out", settings(method="sft"))


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"steps": 0}, "steps"),
        ({"method": "sft", "on_policy": 0.5}, "on_policy"),
        ({"beta": 2.0}, "beta"),
        ({"held_out_share": 1.0}, "held_out"),
        ({"trains": "all"}, "trains"),
    ],
)
def test_settings_that_cannot_be_are_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        RecoverySettings(**given)
    assert caught.value.param == field


def test_neighbours_of_a_cut() -> None:
    record = {"step": "compact", "plan": {"shape": {"mlp_channels": [512, 384]}}, "recipe": {"layers": [*range(8)]}}
    assert LastCut.of([{"step": "forge", "stages": [record, {"step": "recover"}]}], TINY) == LastCut.of([record], TINY)
    names = LastCut.of([record, {"step": "recover"}], TINY).tensors(read_config(TINY))  # type: ignore[arg-type]
    assert "layers.3.mlp.gate_proj.weight" in names
    assert {"norm.weight", "layers.3.self_attn.q_norm.weight", "layers.0.linear_attn.norm.weight"} <= set(names)
    assert "layers.3.self_attn.q_proj.weight" not in names
    gone = {"step": "compact", "plan": {"shape": {"layers": [8, 6]}}, "recipe": {"layers": [0, 1, 3, 4, 5, 7]}}
    assert LastCut.of([gone], TINY) == LastCut((), (1, 2, 4, 5))


def test_samples_are_those_of_one_forward_after_the_other(base: Path) -> None:
    model = load_model(base, dtype="float32", device="cpu")
    prompts = [[3, 17, 250], [5] * 20, [99]]
    greedy = OfflineSampler(model, ends=(), max_new_tokens=18, temperature=0.0, tokens_at_once=60)
    for prompt, completion in zip(prompts, greedy.sample(prompts), strict=True):
        ids = [*prompt, *completion]
        with torch.no_grad():
            hidden = model.forward_probed(torch.tensor(ids[:-1]), [len(ids) - 1], Probe())
        assert model.logits(hidden[len(prompt) - 1 :]).argmax(-1).tolist() == completion

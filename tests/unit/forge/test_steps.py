"""The steps one after the other, as the process behind `temper forge` does them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from services.engine.models.checkpoint import checkpoint_digest
from services.engine.models.registry import read_config
from services.forge.__main__ import main
from services.forge.cut import Cut, CutFile
from tests.unit.forge.models import TINY, reference_logits


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
    """Exit status, last event, and those before."""
    status = main([str(argument) for argument in arguments])
    *progress, last = map(json.loads, capsys.readouterr().out.splitlines())
    return status, last, progress


def test_from_a_checkpoint_to_a_smaller_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "What is 12 plus 7?"}\n{"prompt": "Who are you?", "completion": "I am Temper."}\n')
    scores, cut, out = (tmp_path / name for name in ("scores.json", "cut.json", "out"))
    status, result, progress = run(
        capsys,
        "importance",
        "--model",
        TINY,
        "--out",
        scores,
        "--method",
        "gradients",
        "--data",
        data,
        "--data-name",
        "few",
    )
    assert (status, result["event"], result["data"]["name"]) == (0, "result", "few")
    assert [event["done"] for event in progress if event["stage"] == "gradients"][-1] == result["data"]["tokens"]
    levels = ("--mlp-channels", "25%", "--kv-groups", "1", "--layers", "1")
    prune = ("prune", "--model", TINY, "--scores", scores, "--out", cut, *levels)
    status, planned, _ = run(capsys, *prune, "--dry-run")
    assert (status, planned["out"], cut.exists()) == (0, None, False)
    status, chosen, _ = run(capsys, *prune)
    assert chosen["plan"] == planned["plan"]
    assert CutFile.read(cut).chosen["data"]["sha256"] == result["data"]["sha256"]
    status, planned, _ = run(capsys, "compact", "--model", TINY, "--cut", cut, "--out", out, "--dry-run")
    assert (planned["plan"], out.exists()) == (chosen["plan"], False)
    status, done, progress = run(capsys, "compact", "--model", TINY, "--cut", cut, "--out", out)
    assert (status, done["plan"]) == (0, planned["plan"])
    assert done["digest"] == checkpoint_digest(out)
    assert progress[-1]["done"] == progress[-1]["total"] == done["plan"]["bytes_after"]
    assert read_config(out).intermediate_size == 384
    assert reference_logits(out).isfinite().all()
    status, done, _ = run(capsys, "quantize", "--model", out, "--out", tmp_path / "float8")
    assert status == 0
    assert done["plan"]["bytes"] == chosen["plan"]["bytes_after"] > done["plan"]["bytes_after"]
    status, error, _ = run(capsys, "compact", "--model", out, "--cut", cut, "--out", tmp_path / "again")
    assert (status, error["code"]) == (1, "invalid_request")
    assert "choose its units anew" in error["message"]
    status, error, _ = run(capsys, "compact", "--model", TINY, "--cut", cut, "--out", out)
    assert "is there already" in error["message"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("importance", "--method", "activations"), "is measured on data"),
        (("importance", "--method", "activations", "--data", "/none.jsonl"), "cannot read /none.jsonl"),
        (("prune", "--scores", "/none.json", "--layers", "1"), "cannot read /none.json"),
        (("prune", "--scores", TINY / "config.json", "--layers", "1"), "is not scores of"),
        (("prune", "--scores", TINY / "config.json", "--layers", "some"), "write a share like 25%"),
        (("compact", "--cut", TINY / "config.json"), "is not a cut of"),
    ],
)
def test_what_is_wrong_is_told_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str | Path, ...], message: str
) -> None:
    status, error, _ = run(capsys, *arguments, "--model", TINY, "--out", tmp_path / "out")
    assert (status, error["event"]) == (1, "error")
    assert message in error["message"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """The peak of the process' own memory while it writes a model many times larger."""
    config = json.loads((TINY / "config.json").read_text())
    config |= {"hidden_size": 2048, "intermediate_size": 4096, "vocab_size": 24576, "num_hidden_layers": 2}
    config["layer_types"] = ["linear_attention", "full_attention"]
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(config))
    shapes = read_config(base).tensor_shapes()
    tensors = {f"model.{name}": torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    del tensors
    channels = {f"layers.{index}": tuple(range(index, 2048 + index)) for index in range(2)}
    CutFile(Cut((0, 1), {"mlp_channels": channels}), checkpoint_digest(base), {}).write(tmp_path / "cut.json")
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from services.forge.__main__ import main\n"
        "def own():\n"
        "    rows = dict(line.split(':') for line in Path('/proc/self/status').read_text().splitlines())\n"
        "    return int(rows['RssAnon'].split()[0])\n"
        "before = own()\n"
        "print(before, file=sys.stderr, flush=True)\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["compact", "--model", base, "--cut", tmp_path / "cut.json", "--out", tmp_path / "out"]
    command = [sys.executable, "-c", code, *map(str, arguments)]
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        before = int(process.stderr.readline())
        while process.poll() is None:
            peak = max(peak, _own_memory(process.pid))
            time.sleep(0.005)
    assert process.returncode == 0
    written = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert written > 150 * 2**20
    assert peak - before < 60 * 2**10, f"{(peak - before) / 2**10:.0f} MiB for {written / 2**20:.0f} MiB"


def _own_memory(pid: int) -> int:
    """KiB that belong to the process alone, mapped files aside."""
    try:
        rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return int(rows["RssAnon"].split()[0])
    except (OSError, KeyError):
        return 0

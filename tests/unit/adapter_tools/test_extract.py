"""A base and an adapter as one checkpoint: transformers gives the logits of transformers with PEFT."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.adapter_tools import output
from services.adapter_tools.__main__ import main
from services.adapter_tools.extract import RECORD, extract
from services.adapter_tools.files import AdapterDirectory
from services.common.adapters.manifest import Manifest
from services.common.errors import AdapterRejected, CheckpointRejected, InvalidRequest
from services.engine.models.checkpoint import checkpoint_digest
from services.engine.models.registry import read_config
from tests.unit.adapter_tools.adapters import adapter

TINY = Path(__file__).resolve().parents[3] / "models" / "tiny"
TOKENS = torch.tensor([[3, 17, 250, 99, 5, 5, 301, 7, 42, 11]])


def write(directory: Path, files: dict[str, bytes], manifest: Manifest | None = None) -> Path:
    directory.mkdir()
    AdapterDirectory(files, None if manifest is None else manifest).with_files(files).write(directory)
    return directory


def manifest_for(base_digest: str) -> Manifest:
    return Manifest(name="bot", version=3, digest="", base_digest=base_digest, files={}, created_at=1.0)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS, use_cache=False).logits.double()


def peft_logits(base: Path, files: dict[str, bytes], directory: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Without and with the adapter, in float64: what products of float32 round off depends on the processor."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    plain = logits(model)
    return plain, logits(PeftModel.from_pretrained(model, write(directory, files)))


@pytest.mark.parametrize("max_shard_bytes", [5 * 10**9, 2 * 2**20])
def test_the_tiny_model_with_an_adapter(tmp_path: Path, max_shard_bytes: int) -> None:
    files = adapter(read_config(TINY), rank=8, alpha=12, rslora=True, size=0.02)
    plain, wanted = peft_logits(TINY, files, tmp_path / "adapter")
    steps: list[tuple[str, int, int]] = []
    result = extract(
        TINY,
        files,
        tmp_path / "out",
        base_digest=checkpoint_digest(TINY),
        source="bot@3",
        dtype="float32",
        max_shard_bytes=max_shard_bytes,
        progress=lambda *step: steps.append(step),
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.float32
    found = logits(model.double())
    assert float((found - wanted).abs().max()) <= 1e-5
    assert float((wanted - plain).abs().max()) > 0.1, "the adapter changes something"
    assert (result.shards > 1) == (max_shard_bytes < 2**30)
    assert max(result.lost.values()) < 1e-4
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    base_names = {name for path in TINY.glob("*.safetensors") for name in load_file(path)}
    assert set(index["weight_map"]) == base_names, "the base's own names, the mtp layer's, too"
    assert index["metadata"]["total_size"] == result.bytes
    assert steps[-1] == ("writing", result.bytes, result.bytes)
    record = json.loads((tmp_path / "out" / RECORD).read_text())
    assert (record["adapter"], record["base_digest"]) == ("bot@3", checkpoint_digest(TINY))
    tokenizers = [AutoTokenizer.from_pretrained(path) for path in (TINY, tmp_path / "out")]
    assert tokenizers[0]("What day is it?") == tokenizers[1]("What day is it?")
    assert (tmp_path / "out" / "chat_template.jinja").exists()
    assert not list(tmp_path.glob(".*partial"))


def test_in_the_bases_own_dtype_each_weight_is_rounded_once(tmp_path: Path) -> None:
    config = read_config(TINY)
    files = adapter(config, rank=4, modules=["q_proj", "in_proj_qkv"], size=0.05)
    result = extract(TINY, files, tmp_path / "out", base_digest=None, source="bot")
    before, after = load_file(TINY / "model.safetensors"), load_file(next((tmp_path / "out").glob("*.safetensors")))
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float64), write(tmp_path / "adapter", files)
    ).merge_and_unload()
    exact = model.state_dict()
    changed = 0
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        if not torch.equal(after[name], tensor):
            changed += 1
            assert torch.equal(after[name], exact[name].to(tensor.dtype)), name
    assert changed == result.adapted == 8
    assert 0 < result.summary()["rounding_mean"] < 0.5


def test_another_base_is_refused_and_leaves_nothing(tmp_path: Path, checkpoint: Path) -> None:
    files = adapter(read_config(checkpoint))
    with pytest.raises(AdapterRejected, match="another base model"):
        extract(checkpoint, files, tmp_path / "out", base_digest="0" * 64, source="bot@3")
    with pytest.raises(AdapterRejected, match="binds to no linear layer"):
        extract(TINY, files, tmp_path / "out", base_digest=None, source="bot@3")
    assert list(tmp_path.iterdir()) == []


def test_the_disk_is_looked_at_before_anything_is_written(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")(10**9, 0, 70 * 2**20)
    files = adapter(read_config(TINY))
    monkeypatch.setattr(output.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(InvalidRequest, match=r"needs \d+\.\d MiB.*has 70\.0 MiB free"):
        extract(TINY, files, tmp_path / "out", base_digest=None, source="bot")
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_is_there_is_never_touched(tmp_path: Path, checkpoint: Path) -> None:
    files = adapter(read_config(checkpoint))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(InvalidRequest, match="is there already"):
        extract(checkpoint, files, tmp_path / "out", base_digest=None, source="bot")
    assert (tmp_path / "out" / "mine").read_text() == "mine"


def test_a_failure_in_the_middle_leaves_nothing(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("services.engine.models.weights.shards.shutil.copyfile", full)
    files = adapter(read_config(checkpoint))
    with pytest.raises(InvalidRequest, match="No space left"):
        extract(checkpoint, files, tmp_path / "out", base_digest=None, source="bot")
    assert list(tmp_path.iterdir()) == []


def test_an_incomplete_base_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    broken = tmp_path / "base"
    shutil.copytree(checkpoint, broken)
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    files = adapter(read_config(checkpoint))
    with pytest.raises(CheckpointRejected, match=r"layers\.1\.self_attn\.q_proj"):
        extract(broken, files, tmp_path / "out", base_digest=None, source="bot")


@pytest.mark.thorough
def test_memory_stays_that_of_a_few_rows(tmp_path: Path) -> None:
    """The process never holds the model: its peak is measured while it writes one many times larger than that."""
    config = json.loads((TINY / "config.json").read_text())
    width = 2048
    config |= {"hidden_size": width, "intermediate_size": 4096, "vocab_size": 65536, "num_hidden_layers": 2}
    config["layer_types"] = ["linear_attention", "full_attention"]
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(config))
    shapes = read_config(base).tensor_shapes()
    tensors = {f"model.{name}": torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    del tensors
    size = (base / "model.safetensors").stat().st_size
    assert size > 350 * 2**20
    files = adapter(read_config(base), rank=2)
    directory = write(tmp_path / "adapter", files)
    code = (
        "import sys, torch, services.adapter_tools.extract\n"
        "from pathlib import Path\n"
        "from services.adapter_tools.__main__ import main\n"
        "torch.ones(8, 8) @ torch.ones(8, 8)\n"
        "status = main(sys.argv[1:])\n"
        "rows = dict(line.split(':') for line in Path('/proc/self/status').read_text().splitlines())\n"
        "print(rows['RssAnon'].split()[0])\n"
        "sys.exit(status)"
    )
    arguments = ["extract", "--any-base", "--adapter", str(directory), "--base", str(base)]
    arguments += ["--out", str(tmp_path / "out")]
    with subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True) as process:
        peak = 0
        while process.poll() is None:
            peak = max(peak, _anonymous(process.pid))
            time.sleep(0.01)
        lines = process.stdout.read().splitlines() if process.stdout else []
    assert process.returncode == 0, lines
    assert json.loads(lines[-2])["event"] == "result"
    assert peak - int(lines[-1]) * 1024 < size / 3


def _anonymous(pid: int) -> int:
    """Bytes of a process that are not pages of files."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def run_main(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, list[dict[str, Any]]]:
    before = signal.getsignal(signal.SIGTERM)
    status = main([str(argument) for argument in arguments])
    signal.signal(signal.SIGTERM, before)
    return status, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_process_says_what_it_does(tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = adapter(read_config(checkpoint))
    known = write(tmp_path / "known", files, manifest_for(checkpoint_digest(checkpoint)))
    other = write(tmp_path / "other", files, manifest_for("1" * 64))
    unknown = write(tmp_path / "unknown", files)
    status, events = run_main(capsys, "extract", "--adapter", known, "--base", checkpoint, "--out", tmp_path / "a")
    assert (status, events[-1]["event"]) == (0, "result")
    assert {"checking the base", "writing"} <= {event.get("stage") for event in events}
    status, events = run_main(capsys, "extract", "--adapter", other, "--base", checkpoint, "--out", tmp_path / "b")
    assert (status, events[-1]["code"]) == (1, "adapter_rejected")
    status, events = run_main(capsys, "extract", "--adapter", unknown, "--base", checkpoint, "--out", tmp_path / "b")
    assert (status, "--any-base" in events[-1]["message"]) == (1, True)
    assert not (tmp_path / "b").exists()
    arguments = ("extract", "--adapter", unknown, "--base", checkpoint, "--out", tmp_path / "b", "--any-base")
    assert run_main(capsys, *arguments)[0] == 0
    status, events = run_main(capsys, *arguments[:2], tmp_path / "nobody", *arguments[3:5], "--out", tmp_path / "c")
    assert (status, "nobody/adapter_model.safetensors does not exist" in events[-1]["message"]) == (1, True)
    (known / "adapter_model.safetensors").write_bytes(b"other")
    status, events = run_main(capsys, "extract", "--adapter", known, "--base", checkpoint, "--out", tmp_path / "c")
    assert (status, "manifest.json describes" in events[-1]["message"]) == (1, True)


def test_a_stopped_process_leaves_nothing(tmp_path: Path) -> None:
    files = adapter(read_config(TINY))
    directory = write(tmp_path / "adapter", files)
    code = (
        "import sys, time\n"
        "from services.adapter_tools import extract as module\n"
        "from services.adapter_tools.__main__ import main\n"
        "pieces = module._pieces\n"
        "module._pieces = lambda entry, lost: (time.sleep(0.2), pieces(entry, lost))[1]\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["extract", "--any-base", "--adapter", str(directory), "--base", str(TINY)]
    arguments += ["--out", str(tmp_path / "out")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        for line in process.stdout or ():
            if '"writing"' in line:
                assert list(tmp_path.glob(".out.*.partial")), "it writes beside the directory"
                process.send_signal(signal.SIGTERM)
                break
        process.wait(30)
    assert process.returncode == 143
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter"]

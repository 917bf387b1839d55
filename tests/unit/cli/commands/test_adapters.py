"""`temper adapters`: versions, merges and conversions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.runner import JOB, routes, temper
from tests.unit.cli.server import Reply, Seen, serving, sse

ROOT = Path(__file__).resolve().parents[4]


VERSIONS = [{"name": "polite", "version": n, "current": n == 3, "attached": n == 3} for n in (1, 2, 3)]


def test_rollback_attaches_the_version_before() -> None:
    answer = routes(
        GET_v1_adapters=Reply({"data": [], "attached": "polite@3"}),
        GET_v1_adapters_polite_versions=Reply({"data": VERSIONS}),
        POST_v1_adapters_polite_attach=Reply({"attached": "polite@2"}),
    )
    with serving(answer) as (url, requests):
        result = temper("adapters", "rollback", url=url)
    assert result.exit_code == 0, result.stderr
    assert requests[-1].json == {"version": 2}
    assert "polite@2" in result.stdout


def test_rollback_without_anything_attached_is_refused() -> None:
    with serving(routes(GET_v1_adapters=Reply({"data": [], "attached": None}))) as (url, requests):
        assert temper("adapters", "rollback", url=url).exit_code == 1
    assert [seen.method for seen in requests] == ["GET"]


def test_download_leaves_no_half_file_behind(tmp_path: Path) -> None:
    def download(seen: Seen) -> Reply:
        if "safetensors" in seen.path:
            return Reply(b"weights", headers={"x-temper-adapter": "polite@3"}, content_type="application/octet-stream")
        return Reply({"error": {"message": "gone"}}, 404)

    target = tmp_path / "out"
    listed = Reply({"data": [{"name": "polite", "version": 3}]})
    answers = routes(GET_v1_adapters_polite_download=download, GET_v1_adapters_polite_versions=listed)
    with serving(answers) as (url, _):
        assert temper("adapters", "download", "polite@3", str(target), url=url).exit_code == 1
    assert sorted(file.name for file in target.iterdir()) == ["adapter_model.safetensors"]


def test_upload_needs_both_files(tmp_path: Path) -> None:
    result = temper("adapters", "upload", str(tmp_path), "--name", "polite", url="http://127.0.0.1:9")
    assert result.exit_code == 2
    assert "adapter_model.safetensors does not exist" in result.stderr


def test_a_drafter_is_moved_by_its_own_files(tmp_path: Path) -> None:
    listed = Reply({"data": [{"name": "sharp", "version": 1, "kind": "drafter"}]})
    answers = routes(
        GET_v1_adapters_sharp_download=Reply(b"bytes", content_type="application/octet-stream"),
        GET_v1_adapters_sharp_versions=listed,
        POST_v1_adapters=Reply({"version": 2}, 201),
        GET_v1_adapters=Reply({"data": [{"name": "sharp", "kind": "drafter", "current": 1, "attached": None}]}),
    )
    with serving(answers) as (url, requests):
        saved = temper("adapters", "download", "sharp@1", str(tmp_path), url=url)
        sent = temper("adapters", "upload", str(tmp_path), "--name", "sharp", url=url)
        shown = temper("adapters", "list", url=url)
    assert saved.exit_code == sent.exit_code == shown.exit_code == 0, saved.stderr + sent.stderr + shown.stderr
    names = ["drafter.json", "drafter.safetensors", "manifest.json"]
    assert sorted(file.name for file in tmp_path.iterdir()) == names
    body = next(seen.body for seen in requests if seen.method == "POST")
    assert b'name="drafter.json"' in body
    assert b"adapter_config" not in body
    assert "drafter" in shown.stdout


def test_rollback_of_a_name_moves_its_pointer() -> None:
    answer = Reply({"before": "polite@3", "current": "polite@1", "attached": "polite@1"})
    with serving(routes(POST_v1_adapters_polite_rollback=answer)) as (url, requests):
        plain = temper("adapters", "rollback", "polite", url=url)
        to = temper("adapters", "rollback", "polite", "--to", "1", "--json", url=url)
        wrong = temper("adapters", "rollback", "polite@1", url=url)
    assert plain.exit_code == to.exit_code == 0, plain.stderr
    assert "polite@3 → polite@1 is current, attached polite@1" in plain.stdout
    assert json.loads(to.stdout)["current"] == "polite@1"
    assert [seen.json for seen in requests] == [{}, {"version": 1}]
    assert wrong.exit_code == 2
    assert "--to 1" in wrong.stderr


def test_prune_says_what_goes_and_what_stays() -> None:
    kept = [{"version": "polite@3", "reason": "current"}]
    answer = Reply({"removed": ["polite@1", "polite@2"], "kept": kept, "freed_bytes": 3 * 2**20})
    with serving(routes(POST_v1_adapters_polite_prune=answer)) as (url, requests):
        result = temper("adapters", "prune", "polite", "--keep", "1", "--days", "2.5", "--dry-run", url=url)
        nothing = temper("adapters", "prune", "polite", url=url)
    assert result.exit_code == 0, result.stderr
    assert "would remove polite@1, polite@2 (3.0 MiB)" in result.stdout
    assert "kept polite@3: current" in result.stdout
    assert [seen.json for seen in requests] == [{"keep": 1, "days": 2.5, "dry_run": True}]
    assert nothing.exit_code == 2
    assert "--keep" in nothing.stderr


def merge_routes(state: str = "succeeded", **more: Any) -> Callable[[Seen], Reply]:
    job = {
        **JOB,
        "kind": "merge",
        "state": state,
        "metrics": {"merge_error_max": 0.25, "merge_error_mean": 0.1},
        **more,
    }
    layers = {"kind": "progress", "data": {"step": 2, "total_steps": 2, "merge_error_max": 0.25}}
    return routes(
        POST_v1_adapters_out_merge=Reply({**job, "state": "queued"}, 202),
        GET_v1_train_jobs_job1_events=sse(("1-0", "progress", layers), ("2-0", "state", {"kind": "state", "data": {}})),
        GET_v1_train_jobs_job1=Reply(job),
    )


def test_merge_sends_weights_and_waits() -> None:
    with serving(merge_routes()) as (url, requests):
        result = temper(
            *("adapters", "merge", "out", "--from", "a@3:0.7", "--from", "b:-0.3", "--from", "c"),
            *("--method", "ties", "--rank", "16", "--density", "0.2", "--seed", "4", "--idempotency-key", "k"),
            url=url,
        )
    assert result.exit_code == 0, result.stderr
    assert requests[0].json == {
        "sources": [{"adapter": "a@3", "weight": 0.7}, {"adapter": "b", "weight": -0.3}, {"adapter": "c"}],
        "method": "ties",
        "rank": 16,
        "density": 0.2,
        "scale": 1.0,
        "seed": 4,
        "attach": False,
    }
    assert requests[0].headers["idempotency-key"] == "k"
    assert "merge_error_max 0.25" in result.stderr
    assert "cuts off 10.00% of a layer's delta on average, 25.00% at most" in result.stdout


def test_a_merge_that_fails_is_exit_1() -> None:
    with serving(merge_routes("failed", reason="the exact sum has rank 96: give rank")) as (url, _):
        waited = temper("adapters", "merge", "out", "--from", "a", url=url)
        queued = temper("adapters", "merge", "out", "--from", "a", "--no-wait", url=url)
    assert waited.exit_code == 1
    assert "give rank" in waited.stderr
    assert queued.exit_code == 0
    assert "temper train watch job-1" in queued.stdout


@pytest.mark.parametrize("source", ["a:x", "a@0:1", "../a:1", "base:1", ":1"])
def test_malformed_sources_send_nothing(source: str) -> None:
    with serving(merge_routes()) as (url, requests):
        assert temper("adapters", "merge", "out", "--from", source, url=url).exit_code == 2
    assert not requests


def tiny_adapter(directory: Path) -> Path:
    """Written by the models' own tools, in a process of its own: this one loads no torch."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from services.engine.models.registry import read_config\n"
        "from tests.unit.adapter_tools.adapters import adapter\n"
        "for name, data in adapter(read_config('models/tiny')).items():\n"
        "    (Path(sys.argv[1]) / name).write_bytes(data)\n"
    )
    directory.mkdir()
    subprocess.run([sys.executable, "-c", code, str(directory)], cwd=ROOT, check=True, timeout=120)
    return directory


def test_convert_and_extract_directories(tmp_path: Path) -> None:
    source = f"{tiny_adapter(tmp_path / 'adapter')}/"
    result = temper("adapters", "convert", source, str(tmp_path / "there"), "--to", "multimodal", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) | {"bytes": 0, "out": ""} == {
        "from": "text",
        "to": "multimodal",
        "bytes": 0,
        "out": "",
    }
    assert (tmp_path / "there" / "adapter_model.safetensors").exists()
    again = temper("adapters", "convert", source, str(tmp_path / "there"), "--to", "text")
    assert again.exit_code == 2
    assert "is there already" in again.stderr

    tiny = str(ROOT / "models" / "tiny")
    refused = temper("adapters", "extract", source, str(tmp_path / "out"), "--base", tiny)
    assert refused.exit_code == 2
    assert "--any-base" in refused.stderr
    result = temper("adapters", "extract", source, str(tmp_path / "out"), "--base", tiny, "--any-base")
    assert result.exit_code == 0, result.stderr
    assert "layers changed" in result.stdout
    assert (tmp_path / "out" / "config.json").exists()


def test_extract_without_the_engines_packages_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = tmp_path / "hidden"
    (hidden / "torch").mkdir(parents=True)
    (hidden / "torch" / "__init__.py").write_text("raise ModuleNotFoundError('no torch', name='torch')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(hidden), str(ROOT)]))
    source = tmp_path / "adapter"
    source.mkdir()
    result = temper("adapters", "convert", f"{source}/", str(tmp_path / "out"), "--to", "text")
    assert result.exit_code == 1
    assert "torch is not installed here" in result.stderr
    assert "temper[engine]" in result.stderr


def test_download_brings_the_manifest(tmp_path: Path) -> None:
    manifest = {"name": "polite", "version": 3, "base_digest": "d", "files": {}, "digest": "x", "created_at": 1.0}
    listed = {**manifest, "object": "adapter.version", "id": "polite@3", "current": True, "attached": False}
    answer = routes(
        GET_v1_adapters_polite_download=Reply(b"bytes", content_type="application/octet-stream"),
        GET_v1_adapters_polite_versions=Reply({"data": [{**listed, "size_bytes": 9}]}),
    )
    with serving(answer) as (url, _):
        result = temper("adapters", "download", "polite@3", str(tmp_path / "out"), url=url)
    assert result.exit_code == 0, result.stderr
    assert json.loads((tmp_path / "out" / "manifest.json").read_text()) == manifest

"""`temper doctor` names what was planted, against real servers, files and sockets."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

import pytest

from cli.doctor.findings import Status
from services.card_check.torch_and_driver import Versions, judge
from services.common.security.api_keys import Scope
from services.common.settings import CommonSettings
from services.common.storage.object_store import ObjectStore
from tests.integration.doctor_faults import FAULTS, Bench, certificate, keys_open_to_others, redis_forgets
from tests.integration.servers import RunningServer
from tests.stack import ROOT, clean_environment
from tests.unit.cli.server import Reply


@pytest.fixture
def bench(
    tmp_path: Path, settings: CommonSettings, valkey: RunningServer, s3: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:
    for name in [name for name in os.environ if name.startswith("TEMPER_")]:
        monkeypatch.delenv(name)
    with contextlib.ExitStack() as scope:
        made = Bench(tmp_path, settings, monkeypatch, scope)
        made.set(
            redis_url=settings.redis_url.get_secret_value(),
            s3_endpoint=settings.s3_endpoint,
            s3_access_key=settings.s3_access_key.get_secret_value(),
            s3_secret_key=settings.s3_secret_key.get_secret_value(),
            s3_bucket=settings.s3_bucket,
            cache_dir=tmp_path / "cache",
        )
        yield made


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(bench: Bench, name: str) -> None:
    check, words, plant = FAULTS[name]
    plant(bench)
    found = bench.look(check).finding
    assert found.status in (Status.WARNING, Status.FAILURE), found
    assert words in found.message
    assert found.way_out


def test_all_is_well_where_nothing_is_planted(bench: Bench) -> None:
    """So the words above come from what was planted."""
    ObjectStore(bench.settings).check()
    certificate(bench)
    bench.key_file(scopes=(Scope.ADMIN,))
    bench.url = bench.serve(lambda _: Reply({"version": version("temper")}))
    for name in {check for check, _, _ in FAULTS.values()} - {"server", "server.request", "port", "disk.tier"}:
        found = bench.look(name).finding
        assert found.status in (Status.OK, Status.SKIPPED), (name, found)


def test_what_can_be_mended_is_mended(bench: Bench) -> None:
    redis_forgets(bench)
    mended = bench.look("redis.persistence", fix=True)
    assert mended.finding.status is Status.OK
    assert "CONFIG SET appendonly yes" in mended.mended

    keys_open_to_others(bench)
    mended = bench.look("keys", fix=True)
    assert mended.finding.status is Status.OK
    assert mended.mended.startswith("chmod 600")
    assert (bench.directory / "keys.json").stat().st_mode & 0o777 == 0o600
    assert not bench.look("keys", fix=True).mended


def _card(directory: Path, **variables: str) -> Mapping[str, Mapping[str, str]]:
    env = clean_environment({f"TEMPER_{name.upper()}": value for name, value in variables.items()})
    env["PYTHONPATH"] = f"{directory}:{env['PYTHONPATH']}"
    result = subprocess.run(
        [sys.executable, "-m", "services.card_check"], env=env, cwd=ROOT, capture_output=True, text=True, check=True
    )
    findings: dict[str, dict[str, str]] = json.loads(result.stdout.splitlines()[-1])["findings"]
    return findings


def test_faults_of_device_memory_and_kernels_are_named(tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("raise ImportError('libtriton.so: undefined symbol')\n")
    found = _card(tmp_path, device="cpu", quantization="fp8", kv_cache_bytes="900TiB")
    assert "TEMPER_QUANTIZATION=fp8 needs a GPU" in found["device"]["message"]
    assert found["memory"]["status"] == "failure"
    assert "the device lacks" in found["memory"]["message"]
    assert "libtriton.so: undefined symbol" in found["kernel"]["message"]
    assert all(finding["way_out"] for name, finding in found.items() if name != "torch")


@pytest.mark.parametrize(
    ("found", "device", "words"),
    [
        (Versions("2.13.0+cpu", None, (13, 0), True, False), "auto", "built for CPUs"),
        (Versions("2.13.0", (13, 0), (12, 4), True, False), "auto", "needs CUDA 13.0, the driver has 12.4"),
        (Versions("2.13.0", (13, 0), None, True, False), "auto", "finds no driver"),
        (Versions("2.13.0", (13, 0), None, False, False), "cuda", "there is no GPU here"),
    ],
)
def test_faults_of_torch_and_driver_are_named(found: Versions, device: str, words: str) -> None:
    finding = judge(found, device)
    assert words in finding["message"]
    assert finding["way_out"]

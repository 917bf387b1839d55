"""What `temper up` decides before it starts anything."""

from __future__ import annotations

import io
import json
import os
import socket
import stat
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from cli.commands import up as up_module
from cli.commands.up import Terminal, Told, UpOptions, compose, run_up
from cli.local.ports import free_ports
from cli.local.process import DirectoryLock, tail
from cli.local.store_settings import Ports
from cli.local.supervisor import Event, Phase, Service
from cli.main import app
from cli.settings import UpSettings
from services.common.errors import Conflict, InvalidRequest
from tests.stack import ROOT, TINY, clean_environment


def up(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cli", "up", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=60,
        env=clean_environment(),
        cwd=ROOT,
    )


def ports_of(data_dir: Path) -> Ports:
    return Ports.load_or_choose(data_dir / "ports.json", gateway_port=8420)


def one_error(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1
    return result.stderr


def test_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = up("--model", TINY, "--data-dir", tmp_path / "data", "--port", port)
    assert f"port {port} on 127.0.0.1 is in use" in one_error(result)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((), UpOptions(Path("/m"), "q", "0.0.0.0", 9001, "cpu", "bfloat16")),
        (
            (
                *("--model", "/n", "--served-model-name", "r", "--host", "::", "--port", "9002"),
                *("--device", "auto", "--dtype", "float32"),
            ),
            UpOptions(Path("/n"), "r", "::", 9002, "auto", "float32"),
        ),
    ],
    ids=["variables", "options"],
)
def test_options_win_over_variables_and_those_over_defaults(
    args: tuple[str, ...], expected: UpOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[UpOptions] = []
    monkeypatch.setattr("cli.commands.up.run_up", lambda options: ran.append(options) or 0)
    env = {
        "MODEL": "/m",
        "SERVED_MODEL_NAME": "q",
        "HOST": "0.0.0.0",
        "PORT": "9001",
        "DEVICE": "cpu",
        "DTYPE": "bfloat16",
    }
    result = CliRunner().invoke(app, ["up", *args], env={f"TEMPER_{name}": value for name, value in env.items()})
    assert result.exit_code == 0, result.output
    assert ran == [expected]


def test_a_variable_that_is_wrong_is_named() -> None:
    result = CliRunner().invoke(app, ["up"], env={"TEMPER_DTYPE": "float8", "COLUMNS": "200"})
    assert result.exit_code == 2
    assert "TEMPER_DTYPE" in result.output
    assert "float8" in result.output


def test_a_setting_that_a_service_refuses_ends_the_start_and_a_mistyped_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = UpOptions(TINY, data_dir=tmp_path / "data")
    monkeypatch.setenv("TEMPER_MAX_NUM_SEQ", "3")
    monkeypatch.setenv("TEMPER_MAX_NUM_SEQS", "many")
    assert run_up(options) == 1
    assert "TEMPER_MAX_NUM_SEQS: " in capsys.readouterr().err
    assert not options.data_dir.exists()
    monkeypatch.setenv("TEMPER_MAX_NUM_SEQS", "3")
    monkeypatch.setattr("cli.commands.up._run", lambda *_: 0)
    monkeypatch.setattr("cli.commands.up._check_port", lambda _: None)
    assert run_up(options) == 0
    assert "TEMPER_MAX_NUM_SEQ (is it TEMPER_MAX_NUM_SEQS?)" in capsys.readouterr().err


def test_data_directory_in_use(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    with DirectoryLock(data):
        result = up("--model", TINY, "--data-dir", data)
    assert "is in use by another `temper up`" in one_error(result)
    with DirectoryLock(data):  # and it is free again
        pass


def test_not_a_model(tmp_path: Path) -> None:
    assert "has no config.json" in one_error(up("--model", tmp_path, "--data-dir", tmp_path / "data"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "gpu.example.com", ""])
def test_others_are_let_in_with_keys_or_when_asked_for(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    monkeypatch.setattr("cli.commands.up._run", lambda options, *_: ran.append(options.host) or 0)
    monkeypatch.setattr("cli.commands.up._check_port", lambda _: None)
    monkeypatch.delenv("TEMPER_API_KEYS_FILE", raising=False)
    options = UpOptions(TINY, host=host, data_dir=tmp_path / "data")
    assert run_up(options) == 1
    told = capsys.readouterr().err
    assert "--no-keys" in told
    assert "TEMPER_API_KEYS_FILE" in told
    assert not ran
    assert run_up(replace(options, no_keys=True)) == 0
    assert "warning: no API keys: everybody who reaches" in capsys.readouterr().err
    keys = tmp_path / "keys.json"
    create = ("keys", "create", "--name", "me", "--scopes", "inference,train,admin", "--file", str(keys))
    assert CliRunner().invoke(app, create).exit_code == 0
    monkeypatch.setenv("TEMPER_API_KEYS_FILE", str(keys))
    assert run_up(options) == 0
    assert not capsys.readouterr().err
    assert ran == [host, host]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_is_not_exposed(host: str) -> None:
    assert not UpOptions(host=host).exposed


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "args", [("--port", "0"), ("--port", "70000"), ("--device", "tpu"), ("--engines", "0"), ("--what",)]
)
def test_bad_options_are_usage_errors(args: tuple[str, ...]) -> None:
    assert up(*args).returncode == 2


def test_composition_keeps_secrets_private_and_stores_local(tmp_path: Path) -> None:
    services, ports = compose(UpOptions(), tmp_path, UpSettings(), ports_of(tmp_path))
    assert [service.name for service in services] == ["valkey", "s3", "engine", "gateway"]
    secrets = tmp_path / "secrets.json"
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o600
    credentials = json.loads(secrets.read_text())
    for service in services:
        for secret in (credentials["redis_password"], credentials["s3_secret_key"]):
            assert not any(secret in word for word in service.argv), "everybody can read a command line"
    assert stat.S_IMODE((tmp_path / "valkey" / "valkey.conf").stat().st_mode) == 0o600
    assert "127.0.0.1" in services[0].argv
    assert "-ip.bind=127.0.0.1" in services[1].argv
    assert services[2].env["TEMPER_GRPC_HOST"] == "127.0.0.1"
    # A second start finds the same credentials and, while they are free, the same ports.
    again, same_ports = compose(UpOptions(), tmp_path, UpSettings(), ports_of(tmp_path))
    assert same_ports == ports
    assert again[2].env == services[2].env


def test_several_engines_have_what_is_theirs_apart(tmp_path: Path) -> None:
    gpus = ["3", "5", "6"]
    settings = UpSettings(
        torch_threads=0, metrics_port=9100, kv_events="tcp://*:5557", kv_events_replay="tcp://indexer:5558"
    )
    first = ports_of(tmp_path)
    for claim in (first.redis, first.s3, *first.engines):
        claim.release()
    ports = Ports.load_or_choose(tmp_path / "ports.json", gateway_port=8420, engines=3)
    assert (ports.redis.number, ports.engines[0].number) == (first.redis.number, first.engines[0].number)
    services, used = compose(UpOptions(engines=3), tmp_path, settings, ports, gpus)
    assert [one.name for one in services] == ["valkey", "s3", "engine", "engine-2", "engine-3", "gateway"]
    engines, gateway = services[2:5], services[5]
    assert gateway.env["TEMPER_ENGINES"].split(",") == [f"127.0.0.1:{used[one.name]}" for one in engines]
    assert [one.env["CUDA_VISIBLE_DEVICES"] for one in engines] == ["3", "5", "6"]
    assert [one.env.get("TEMPER_METRICS_PORT") for one in engines] == [None, "9101", "9102"], "the first inherits it"
    assert engines[1].env["TEMPER_KV_EVENTS"] == "tcp://*:5558"
    assert "TEMPER_KV_EVENTS_REPLAY" not in engines[1].env, "they connect to one indexer"
    for name in ("TEMPER_ENGINE_NAME", "TEMPER_GRPC_PORT", "TEMPER_CHECKPOINT_DIR", "TEMPER_FORGE_DIR"):
        assert len({one.env[name] for one in engines}) == 3, name
    assert len({one.log for one in engines}) == 3

    with pytest.raises(InvalidRequest, match=r"--engines 4: .* there are 3; --device cpu"):
        compose(UpOptions(engines=4), tmp_path, settings, ports, gpus)
    on_cpu, _ = compose(UpOptions(engines=3, device="cpu"), tmp_path, settings, ports)
    for one in on_cpu[2:5]:
        assert "CUDA_VISIBLE_DEVICES" not in one.env
        assert int(one.env["TEMPER_TORCH_THREADS"]) >= 1


def test_gateways_share_a_port_and_are_asked_at_their_own(tmp_path: Path) -> None:
    ports = Ports.load_or_choose(tmp_path / "ports.json", gateway_port=8420, engines=2, gateways=2)
    services, used = compose(UpOptions(engines=2, device="cpu"), tmp_path, UpSettings(), ports)
    gateways = [one for one in services if one.name.startswith("gateway")]
    assert [one.name for one in gateways] == ["gateway", "gateway-2"]
    assert {one.env["TEMPER_PORT"] for one in gateways} == {"8420"}
    own = [one.env["TEMPER_OWN_PORT"] for one in gateways]
    assert own == [str(used["gateway alone"]), str(used["gateway-2 alone"])]
    for gateway, port in zip(gateways, own, strict=True):
        assert gateway.alive is not None
        assert f":{port}/livez" in (gateway.alive() or "")
    alone, _ = compose(UpOptions(), tmp_path, UpSettings(), ports_of(tmp_path))
    assert alone[-1].env["TEMPER_OWN_PORT"] == "0"


@pytest.mark.parametrize(
    ("given", "gpus", "started"),
    [
        ({}, ["0", "1"], 1),
        ({"engines": 2}, ["0", "1"], 2),
        ({"engines": 2}, [], 1),
        ({"engines": 2, "device": "cpu"}, ["0", "1"], 1),
        ({"engines": 2, "gateways": 1}, ["0", "1"], 1),
        ({"gateways": 3}, [], 3),
    ],
)
def test_gateways_by_default(
    given: dict[str, Any], gpus: list[str], started: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as engines where these have GPUs: what two generate is more than one process passes on."""
    monkeypatch.setattr(up_module, "visible_gpus", lambda environment: gpus)
    names: list[str] = []

    class Seen(Exception):
        pass

    def supervised(services: list[Service], **_: object) -> None:
        names.extend(one.name for one in services)
        raise Seen

    monkeypatch.setattr(up_module, "Supervisor", supervised)
    with pytest.raises(Seen):
        run_up(UpOptions(model=TINY, data_dir=tmp_path / "data", port=free_ports(1)[0], **given))
    assert sum(name.startswith("gateway") for name in names) == started


def test_stops_what_takes_requests_first(tmp_path: Path) -> None:
    services, _ = compose(UpOptions(), tmp_path, UpSettings(), ports_of(tmp_path))
    stages = {service.name: service.stop_stage for service in services}
    assert stages["gateway"] > stages["engine"] > stages["s3"] == stages["valkey"]


def test_what_hangs_is_noticed_in_every_process(tmp_path: Path) -> None:
    services, _ = compose(UpOptions(port=free_ports(1)[0]), tmp_path, UpSettings(), ports_of(tmp_path))
    for service in services:
        assert service.alive is not None
        assert service.alive(), f"nothing listens for {service.name}, and it counts as alive"


def test_external_stores_replace_local_ones(tmp_path: Path) -> None:
    external = UpSettings(
        redis_url=SecretStr("redis://elsewhere:6379/0"),
        s3_endpoint="elsewhere:9000",
        s3_access_key=SecretStr("a"),
        s3_secret_key=SecretStr("b"),
    )
    services, ports = compose(UpOptions(), tmp_path, external, ports_of(tmp_path))
    assert [service.name for service in services] == ["engine", "gateway"]
    assert set(ports) == {"engine", "gateway"}
    assert "TEMPER_REDIS_URL" not in services[0].env, "it is inherited"


def test_external_s3_needs_its_credentials(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="TEMPER_S3_SECRET_KEY"):
        compose(UpOptions(), tmp_path, UpSettings(s3_endpoint="elsewhere:9000"), ports_of(tmp_path))


def test_a_model_of_an_object_store_is_fetched_before_the_engine_starts(tmp_path: Path) -> None:
    def engine(model: str) -> Service:
        settings = UpSettings(model_digest="ab" * 32)
        services, _ = compose(UpOptions(model=model), tmp_path, settings, ports_of(tmp_path))
        return next(service for service in services if service.name == "engine")

    found = engine("s3://bucket/forged/one")
    assert found.argv[1:] == ["-m", "services.model_source", "--then", "services.pod"]
    assert found.env["TEMPER_MODEL_SOURCE"] == "s3://bucket/forged/one"
    assert found.env["TEMPER_MODEL_DIGEST"] == "ab" * 32
    assert Path(found.env["TEMPER_MODEL"]).parent == tmp_path / "models"
    assert engine("s3://bucket/forged/two").env["TEMPER_MODEL"] != found.env["TEMPER_MODEL"]


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://localhost:8420"),
        ("0.0.0.0", "http://localhost:8420"),
        ("10.1.2.3", "http://10.1.2.3:8420"),
        ("::1", "http://[::1]:8420"),
    ],
)
def test_url_is_one_that_works_here(host: str, url: str) -> None:
    assert UpOptions(host=host).url == url


def test_lock_names_its_owner(tmp_path: Path) -> None:
    with DirectoryLock(tmp_path), pytest.raises(Conflict, match=r"process \d+"):
        DirectoryLock(tmp_path)


def test_tail_reads_only_what_is_new(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("old\n")
    offset = log.stat().st_size
    with log.open("a") as file:
        file.write("\n".join(f"line {n}" for n in range(20)))
    assert tail(log, lines=2, offset=offset) == ["line 18", "line 19"]
    assert tail(log, lines=99, offset=offset)[0] == "line 0"
    assert tail(tmp_path / "none", lines=2) == []


def test_what_cannot_be_told_ends_nothing(tmp_path: Path) -> None:
    """The disk is full and comes back; the terminal is gone for good."""
    state, event = tmp_path / "gone" / "state.json", Event("engine", Phase.READY, 7, 1.0)
    text = io.StringIO()
    told = Told(Terminal(file=text), state, {"url": "u"})
    told(event, {"engine": 7})
    told(event, {"engine": 7})
    assert text.getvalue().count("state.json is out of date") == 1, text.getvalue()
    state.parent.mkdir()
    told(event, {"engine": 7})
    assert json.loads(state.read_text()) == {"url": "u", "pids": {"engine": 7}}
    reader, writer = os.pipe()
    os.close(reader)
    pipe = io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True)
    unheard = Told(Terminal(file=pipe), state, {"url": "u"})
    for pid in (8, 9):
        unheard(event, {"engine": pid})
    assert json.loads(state.read_text())["pids"] == {"engine": 9}
    with suppress(BrokenPipeError):
        pipe.close()

"""`temper up` as a user has it: start, trouble, stop, start again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
from safetensors.torch import load_file, save_file

from benchmarks.gateway import several_engines
from cli.local.ports import free_ports
from tests.e2e.jobs import submit_sft, wait_for_end
from tests.stack import PATIENCE, ROOT, TINY, Stack, clean_environment


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds} s"
        time.sleep(0.1)


def answers(stack: Stack) -> bool:
    try:
        return httpx.get(f"{stack.url}/readyz", timeout=2, trust_env=False, verify=False).status_code == 200
    except httpx.TransportError:
        return False


def chat(stack: Stack) -> httpx.Response:
    body = {"model": stack.served_model_name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    return httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=30, trust_env=False)


def addresses_of(stack: Stack) -> set[str]:
    """IP addresses that its processes listen on."""
    found = set()
    for child in stack.children():
        for connection in child.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                found.add(connection.laddr.ip.removeprefix("::ffff:"))  # gRPC listens on mapped addresses
    return found


@pytest.fixture
def own(tmp_path: Path) -> Stack:
    """As a user has it: with as many threads as there are cores."""
    return Stack(tmp_path / "data", env={"TEMPER_TORCH_THREADS": "0"})


def test_one_line_when_ready_and_nothing_but_the_gateway_in_the_open(stack: Stack) -> None:
    assert stack.ready_line == f"Temper is ready on http://localhost:{stack.port}\n"
    assert set(stack.state["pids"]) == {"valkey", "s3", "engine", "gateway"}
    assert chat(stack).status_code == 200
    assert addresses_of(stack) == {"127.0.0.1"}
    assert (stack.data_dir.stat().st_mode & 0o777) == 0o700


@pytest.mark.thorough
def test_second_up_is_refused_by_the_same_directory_and_by_the_same_port(stack: Stack, tmp_path: Path) -> None:
    for data_dir, port, says in (
        (stack.data_dir, free_ports(1)[0], "in use by another `temper up`"),
        (tmp_path / "other", stack.port, f"port {stack.port}"),
    ):
        second = Stack(data_dir, port=port)
        result = subprocess.run(
            second.argv, capture_output=True, text=True, timeout=60, env=clean_environment(), cwd=ROOT
        )
        assert result.returncode == 1
        assert says in result.stderr
        assert result.stdout == ""
    assert answers(stack)


@pytest.mark.thorough
def test_two_engines_behind_two_gateways(tmp_path: Path) -> None:
    """They share jobs, adapters and a port, and one that is killed fails nobody for long."""
    with Stack(tmp_path / "data", options=("--engines", "2", "--gateways", "2", "--device", "cpu")) as two:
        assert set(two.state["pids"]) == {"valkey", "s3", "engine", "engine-2", "gateway", "gateway-2"}
        with httpx.Client(base_url=two.url, timeout=PATIENCE, trust_env=False) as client:
            jobs = [submit_sft(client, name, epochs=1) for name in ("one", "two")]
            assert [wait_for_end(client, one)["state"] for one in jobs] == ["succeeded", "succeeded"]
            attached = client.post("/v1/adapters/one/attach").raise_for_status().json()
            assert (attached["engines_serving"], attached["engines"]) == (2, 2)
            killed = two.pid("engine-2")
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda: chat(two).status_code == 200, "an answer of the other engine")
            wait_until(lambda: two.state["pids"].get("engine-2", killed) != killed, "the restart of the second")

            def both_serve_it() -> bool:
                engines = client.get("/healthz").json()["engines"]
                return [(one["ready"], one.get("attached_adapter")) for one in engines] == [(True, "one@1")] * 2

            wait_until(both_serve_it, "both engines with the adapter")
        killed = two.pid("gateway")
        os.kill(killed, signal.SIGKILL)
        # What was waiting to be accepted by it is lost with it.
        wait_until(lambda: two.state["pids"].get("gateway", killed) != killed, "the restart of the first gateway")
        assert all(chat(two).status_code == 200 for _ in range(8))


@pytest.mark.thorough
def test_one_engine_and_two_as_a_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "lines.jsonl"
    smallest = ["--cases", "2x16x8", "--steps", "10", "--tokens", "32", "--clients", "1"]
    options = ["--model", str(TINY), "--device", "cpu", *smallest, "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["several_engines", *options])
    several_engines.main()
    one, two, shared = map(json.loads, out.read_text().splitlines())
    assert [(line["engines"], line["c"]) for line in (one, two)] == [(1, 2), (2, 4)]
    assert one["times"] == 1.0
    assert two["times"] == pytest.approx(two["decode_tok_s"] / one["decode_tok_s"], rel=1e-3)
    assert (shared["job"], shared["serving"]) == ("succeeded", 2)
    assert sum(shared["killed"]["answers"].values()) == 4


def check_ready_line(own: Stack) -> None:
    """The line of `--json`."""
    line = json.loads(own.ready_line)
    assert line["url"] == f"http://localhost:{own.port}"
    assert set(line["pids"]) == {"valkey", "s3", "engine", "gateway"}


def test_what_dies_comes_back_and_a_restart_keeps_credentials(own: Stack) -> None:
    own.options = ("--json",)
    with own:
        check_ready_line(own)
        before = own.state["pids"]
        for service in ("gateway", "valkey", "s3", "engine"):
            os.kill(own.pid(service), signal.SIGKILL)
        wait_until(lambda: set(own.state["pids"]) == set(before), "the restart of all four")
        wait_until(lambda: answers(own), "readiness")
        assert chat(own).status_code == 200
        assert not set(before.values()) & set(own.state["pids"].values())
        if sys.platform == "linux":
            nothing_survives_a_killed_supervisor(own)
        began = time.monotonic()
        # Ctrl-C in a terminal is SIGINT.
        assert own.stop(signal.SIGINT) == 0
        assert time.monotonic() - began < 30
    assert not (own.data_dir / "state.json").exists()
    stderr = own.stderr_file.read_text()
    stopped = [line.split()[0] for line in stderr.splitlines() if " stopped" in line]
    assert stopped[:2] == ["gateway", "engine"]
    assert "killed: it did not stop" not in stderr


def nothing_survives_a_killed_supervisor(own: Stack) -> None:
    """Only Linux has a parent death signal. Afterwards it runs again: neither a lock nor a half-written store is in the
    way."""
    children = own.children()
    assert len(children) >= 4
    assert own.process is not None
    own.process.kill()
    own.process.wait()
    _, alive = psutil.wait_procs(children, timeout=10)
    own.stop()
    assert not alive
    own.start()
    assert chat(own).status_code == 200


def fails(stack: Stack) -> str:
    """Standard error of a `temper up` that must give up by itself, and leave nothing running."""
    result = subprocess.run(
        stack.argv, capture_output=True, text=True, timeout=60, env=clean_environment(stack.env), cwd=ROOT
    )
    assert result.returncode == 1
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    needle = str(stack.data_dir)
    left = [p for p in psutil.process_iter(["cmdline"]) if any(needle in word for word in p.info["cmdline"] or ())]
    assert not left
    return result.stderr


@pytest.mark.thorough
def test_checkpoint_with_a_missing_tensor_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(TINY, broken, ignore=shutil.ignore_patterns("recipe"))
    tensors = load_file(broken / "model.safetensors")
    victim = next(name for name in sorted(tensors) if name.endswith("k_proj.weight"))
    del tensors[victim]
    save_file(tensors, broken / "model.safetensors")
    message = fails(Stack(tmp_path / "data", model=broken))
    assert victim.removeprefix("model.language_model.").removeprefix("model.") in message


@pytest.mark.thorough
def test_external_redis_that_is_away_is_named(tmp_path: Path) -> None:
    port = free_ports(1)[0]
    message = fails(Stack(tmp_path / "data", env={"TEMPER_REDIS_URL": f"redis://:hush@127.0.0.1:{port}/0"}))
    assert f"127.0.0.1:{port}" in message
    assert "TEMPER_REDIS_URL" in message
    assert "hush" not in message


@pytest.mark.thorough
def test_external_s3_that_is_away_is_named(tmp_path: Path) -> None:
    port = free_ports(1)[0]
    env = {"TEMPER_S3_ENDPOINT": f"127.0.0.1:{port}", "TEMPER_S3_ACCESS_KEY": "a", "TEMPER_S3_SECRET_KEY": "hush"}
    message = fails(Stack(tmp_path / "data", env=env))
    assert f"127.0.0.1:{port}" in message
    assert "TEMPER_S3_ENDPOINT" in message
    assert "hush" not in message

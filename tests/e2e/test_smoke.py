"""What `helm test` runs, against a whole Temper."""

from __future__ import annotations

import subprocess
import sys

import httpx

from cli.local.ports import claim_ports
from tests.e2e.jobs import submit_sft, wait_for_step
from tests.stack import PATIENCE, ROOT, Stack, clean_environment


def smoke(url: str, *options: str, seconds: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.gateway.server.smoke_test", url, *options],
        capture_output=True,
        text=True,
        timeout=200,
        env=clean_environment({"TEMPER_SMOKE_SECONDS": str(seconds)}),
        cwd=ROOT,
    )


def test_it_chats_and_trains_and_leaves_nothing(stack: Stack) -> None:
    before = httpx.get(f"{stack.url}/v1/adapters", timeout=PATIENCE).json()
    done = smoke(stack.url)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "all of it works"
    assert "@1 answers" in done.stdout
    assert " is deleted" in done.stdout
    assert httpx.get(f"{stack.url}/v1/adapters", timeout=PATIENCE).json() == before


def test_nobody_there() -> None:
    (claim,) = claim_ports(1)
    try:
        done = smoke(f"http://127.0.0.1:{claim.number}", seconds=1)
    finally:
        claim.release()
    assert done.returncode == 1
    assert done.stderr.startswith(f"failed: GET http://127.0.0.1:{claim.number}/readyz: ")


def test_a_job_that_does_not_end_is_cancelled(stack: Stack) -> None:
    """Another one has the trainer, of another rank, with which it does not share its steps."""
    with httpx.Client(base_url=stack.url, timeout=30) as client:
        before = client.get("/v1/adapters").json()
        other = submit_sft(client, "smoke-other", epochs=100, lora={"rank": 3})
        wait_for_step(client, other, 1)
        done = smoke(stack.url, seconds=5)
        newest = client.get("/v1/train/jobs", params={"limit": 1}).json()["data"][0]
        client.post(f"/v1/train/jobs/{other}/cancel")
        assert done.returncode == 1
        assert done.stderr == "failed: not done in time; TEMPER_SMOKE_SECONDS allows more\n"
        assert "left behind" not in done.stdout
        assert newest["adapter"].startswith("smoke-")
        assert newest["state"] == "cancelled"
        assert client.get("/v1/adapters").json() == before


def test_a_url_without_a_scheme(stack: Stack) -> None:
    done = smoke("temper-gateway:8420")
    assert done.returncode == 2
    assert "begin with http://" in done.stderr

"""How `temper doctor` makes its checks: none looks at what is known not to answer, or starts what it does not need."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from cli.doctor.check import Check, examine
from cli.doctor.checks import card
from cli.doctor.findings import Finding, Status, failure, ok, skipped
from cli.doctor.place import Place
from cli.doctor.registry import CHECKS
from cli.local import model_directory
from cli.output import CliError, Output

HERE = Place(Path())


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (ok("it is there"), Status.OK),
        (failure("it is away", "start it"), Status.SKIPPED),
        (skipped("none"), Status.SKIPPED),
    ],
)
def test_a_check_is_skipped_where_the_one_that_it_needs_did_not_succeed(first: Finding, second: Status) -> None:
    looked = []

    def detail(_: Place) -> Finding:
        looked.append("detail")
        return ok("it is well")

    checks = (Check("store", lambda _: first), Check("store.detail", detail, needs="store"))
    _, found = examine(HERE, checks)
    assert found.finding.status is second
    assert looked == ([] if second is Status.SKIPPED else ["detail"])
    assert found.finding.message == ("it is well" if second is Status.OK else first.message)


def test_every_check_that_is_needed_comes_before() -> None:
    names = [check.name for check in CHECKS]
    for check in CHECKS:
        assert not check.needs or names.index(check.needs) < names.index(check.name)


def test_stores_that_never_answer_are_waited_for_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        for name, value in {
            "REDIS_URL": f"redis://127.0.0.1:{port}/0",
            "S3_ENDPOINT": f"127.0.0.1:{port}",
            "S3_ACCESS_KEY": "a",
            "S3_SECRET_KEY": "b",
        }.items():
            monkeypatch.setenv(f"TEMPER_{name}", value)
        checks = [check for check in CHECKS if check.name.partition(".")[0] in ("redis", "s3")]
        began = time.monotonic()
        found = [entry.finding.status for entry in examine(Place(tmp_path), checks)]
        assert time.monotonic() - began < 15  # 36 if each asked by itself
    assert found.count(Status.FAILURE) == 2
    assert found.count(Status.SKIPPED) == len(checks) - 2


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CliError("it ended with status -9"), Status.FAILURE),
        (CliError("torch is not installed", error={"message": "torch is not installed"}), Status.SKIPPED),
    ],
)
def test_the_process_with_torch_runs_once_and_its_crash_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, error: CliError, status: Status
) -> None:
    runs = []

    def run(*_: object, **__: object) -> None:
        runs.append(1)
        raise error

    monkeypatch.setattr("cli.doctor.place.run_tool", run)
    place = Place(Path())
    checks = (Check("torch", card.torch), Check("card", card.limits), Check("card.memory", card.memory))
    found = [entry.finding for entry in examine(place, checks)]
    assert [one.status for one in found] == [status, Status.SKIPPED, Status.SKIPPED]
    assert error.message in found[0].message
    assert len(runs) == 1


def test_the_doctor_fetches_no_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("it was fetched")

    monkeypatch.setenv("TEMPER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(model_directory, "pull", refuse)
    output = Output(as_json=True)
    found = model_directory.model_directory("organisation/name", output, fetch=False)
    assert found == model_directory.place_of("hf://organisation/name")
    (model,) = examine(Place(found), [check for check in CHECKS if check.name == "model"])
    assert model.finding.status is Status.FAILURE
    assert "temper pull" in model.finding.way_out

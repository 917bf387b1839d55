"""`temper pull`, and `--model` with what it takes, against a hub and an S3 server."""

from __future__ import annotations

import json
import os
import pty
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import Result

from cli.local.model_directory import place_of
from cli.output import ExitCode
from services.common.settings import CommonSettings
from services.common.storage.object_store import ObjectStore
from services.engine.models.checkpoint import checkpoint_digest
from tests.forked import ForkedProcess, command_line
from tests.integration.model_servers import (
    REPOSITORY,
    BreakingLine,
    Hub,
    checkpoint_files,
    serving,
    stored_checkpoint,
)
from tests.stack import TINY
from tests.unit.cli.runner import temper

DIGEST = checkpoint_digest(TINY)
NOBODY = "127.0.0.1:1"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of its own, and no patience with servers that are away."""
    monkeypatch.setenv("TEMPER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TEMPER_MODEL_ATTEMPTS", "1")
    return tmp_path / "cache"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(Hub(checkpoint_files(TINY))) as hub:
        monkeypatch.setenv("TEMPER_HF_ENDPOINT", hub.endpoint)
        yield hub


@pytest.fixture
def source(s3: object, store: ObjectStore, settings: CommonSettings, monkeypatch: pytest.MonkeyPatch) -> str:
    """s3://…, of the server that the variables name."""
    stored_checkpoint(settings, TINY, "models/tiny")
    monkeypatch.setenv("TEMPER_S3_ENDPOINT", settings.s3_endpoint)
    monkeypatch.setenv("TEMPER_S3_ACCESS_KEY", settings.s3_access_key.get_secret_value())
    monkeypatch.setenv("TEMPER_S3_SECRET_KEY", settings.s3_secret_key.get_secret_value())
    return f"s3://{settings.s3_bucket}/models/tiny"


def pulled(*words: str) -> Path:
    """The directory."""
    result = temper("pull", *words, "--json")
    assert result.exit_code == ExitCode.OK, result.stderr
    found = json.loads(result.stdout)
    assert found["digest"] == DIGEST == checkpoint_digest(Path(found["directory"]))
    return Path(found["directory"])


def refusal(result: Result, code: ExitCode) -> str:
    """The one line on standard error."""
    assert result.exit_code == code, result.stderr
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert "TEMPER_MODEL_SOURCE" not in result.stderr, "a variable that nobody has set"
    return result.stderr


def started(model: str, tmp_path: Path) -> Result:
    """`temper up` with this model, as far as the gateway's port, which others have."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        return temper("up", "--model", model, "--data-dir", str(tmp_path / "data"), "--port", port)


class TestPull:
    def test_fetches_into_the_cache_and_says_the_digest(self, hub: Hub, cache: Path) -> None:
        result = temper("pull", REPOSITORY)
        assert result.exit_code == ExitCode.OK
        place = place_of(f"hf://{REPOSITORY}")
        assert place.is_relative_to(cache)
        assert result.stdout == f"{place} has the digest {DIGEST}\n"
        assert result.stderr == "", "nothing but the result where nobody looks"

    def test_what_is_there_is_not_fetched_again_and_with_a_digest_nobody_is_asked(self, hub: Hub) -> None:
        directory = pulled(REPOSITORY)
        hub.requests.clear()
        assert pulled(REPOSITORY) == directory
        assert not hub.seen("storage", "")
        hub.requests.clear()
        assert pulled(REPOSITORY, "--digest", DIGEST) == directory
        assert not hub.requests

    def test_goes_on_where_it_broke_off(self, hub: Hub, tmp_path: Path) -> None:
        hub.break_after = 1_000_000
        words = (REPOSITORY, "--directory", str(tmp_path / "mine"))
        assert "what has come is kept" in refusal(temper("pull", *words), ExitCode.UNREACHABLE)
        hub.break_after = 0
        hub.requests.clear()
        assert pulled(*words) == tmp_path / "mine"
        assert "bytes=1000000-" in [headers.get("range") for headers in hub.seen("storage", "")]

    def test_another_digest_and_corrupt_bytes_are_refused_and_put_nowhere(self, hub: Hub, tmp_path: Path) -> None:
        directory = tmp_path / "mine"
        words = ("pull", REPOSITORY, "--directory", str(directory))
        message = refusal(temper(*words, "--digest", "0" * 64), ExitCode.FAILED)
        assert message.startswith(f"error: the digest is {'0' * 64}, but what hf://{REPOSITORY}@main on ")
        assert DIGEST in message
        hub.corrupt.add("tokenizer.json")
        hub.files["tokenizer.json"] += b"\n"
        assert "gives other bytes of tokenizer.json than it says" in refusal(temper(*words), ExitCode.FAILED)
        assert not [path for path in directory.iterdir() if not path.name.startswith(".")]
        hub.corrupt.clear()
        pulled(*words[1:])

    def test_wrong_words_are_told_before_anything_is_asked(self, hub: Hub, tmp_path: Path) -> None:
        assert "64 hexadecimal digits" in refusal(temper("pull", REPOSITORY, "--digest", "abc"), ExitCode.USAGE)
        assert "name organisation/name" in refusal(temper("pull", str(tmp_path)), ExitCode.USAGE)
        assert not hub.requests

    def test_what_the_hub_does_not_have(self, hub: Hub) -> None:
        assert "no such repository" in refusal(temper("pull", "acme/none"), ExitCode.FAILED)

    @pytest.mark.thorough
    def test_the_ways_out_where_the_source_is_away(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TEMPER_HF_ENDPOINT", f"http://{NOBODY}")
        message = refusal(temper("pull", REPOSITORY), ExitCode.UNREACHABLE)
        for way in ("copy the directory here", "--model", "TEMPER_HF_ENDPOINT", "HTTPS_PROXY"):
            assert way in message
        monkeypatch.setenv("TEMPER_S3_ENDPOINT", NOBODY)
        message = refusal(temper("pull", "s3://models/tiny"), ExitCode.UNREACHABLE)
        assert "TEMPER_MODEL_S3_ENDPOINT" in message
        assert NOBODY in message

    def test_progress_is_drawn_on_a_terminal(self, hub: Hub, tmp_path: Path) -> None:
        told: list[bytes] = []
        terminal, end = pty.openpty()

        def read() -> None:
            while data := os.read(terminal, 65536):
                told.append(data)
                if b"ended here" in data:
                    return

        reader = threading.Thread(target=read)
        reader.start()
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
        output = tmp_path / "output"
        process = ForkedProcess(
            command_line, "pull", REPOSITORY, environment=environment, log=Path(os.ttyname(end)), output=output
        )
        assert process.wait(60) == 0
        os.write(end, b"ended here")
        reader.join(10)
        os.close(end)
        os.close(terminal)
        size = sum(file.stat().st_size for file in place_of(f"hf://{REPOSITORY}").glob("[!.]*"))
        assert f"{size / 1e6:.1f}/{size / 1e6:.1f} MB" in b"".join(told).decode()
        assert output.read_text().endswith(f" has the digest {DIGEST}\n")


class TestModel:
    def test_a_repository_is_fetched_at_first_use_and_then_nobody_is_asked(self, hub: Hub, tmp_path: Path) -> None:
        assert "port" in started(REPOSITORY, tmp_path).stderr
        directory = place_of(f"hf://{REPOSITORY}")
        assert checkpoint_digest(directory) == DIGEST
        hub.requests.clear()
        assert started(REPOSITORY, tmp_path).exit_code == ExitCode.FAILED
        assert not hub.requests

    def test_one_that_is_no_directory_and_cannot_be_had(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TEMPER_HF_ENDPOINT", f"http://{NOBODY}")
        message = refusal(started(REPOSITORY, tmp_path), ExitCode.UNREACHABLE)
        assert message.startswith(f"error: there is no directory {REPOSITORY}, and as a repository of the hub: ")
        assert "copy the directory here" in message

    @pytest.mark.thorough
    def test_the_digest_of_the_settings_counts(self, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        directory = pulled(REPOSITORY)
        monkeypatch.setenv("TEMPER_MODEL_DIGEST", DIGEST)
        hub.requests.clear()
        assert started(REPOSITORY, tmp_path).exit_code == ExitCode.FAILED
        assert not hub.requests
        (directory / "config.json").write_text("{}")
        assert "port" in started(REPOSITORY, tmp_path).stderr
        assert checkpoint_digest(directory) == DIGEST, "another one was taken for it"
        monkeypatch.setenv("TEMPER_MODEL_DIGEST", "0" * 64)
        assert f"the digest is {'0' * 64}" in refusal(started(REPOSITORY, tmp_path), ExitCode.FAILED)

    def test_a_bucket_that_is_there_before_the_start(
        self, source: str, tmp_path: Path, settings: CommonSettings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        line = BreakingLine(settings.s3_endpoint)
        try:
            monkeypatch.setenv("TEMPER_S3_ENDPOINT", line.address)
            assert "port" in started(source, tmp_path).stderr
            passed = line.passed
            assert passed > 1_000_000
            assert checkpoint_digest(place_of(source)) == DIGEST
            assert "port" in started(source, tmp_path).stderr
            assert line.passed == passed
        finally:
            line.close()

    @pytest.mark.thorough
    def test_buckets_of_two_servers_are_two_models(self, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
        directory = pulled(source)
        monkeypatch.setenv("TEMPER_MODEL_S3_ENDPOINT", NOBODY)
        assert place_of(source) != directory
        assert temper("tune", "--model", source).exit_code == ExitCode.UNREACHABLE

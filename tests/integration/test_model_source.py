"""Checkpoints from a real S3 server and from a server that speaks the hub's API, into a model directory."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from minio import Minio
from pydantic import SecretStr

from services.common.settings import CommonSettings
from services.common.storage.object_store import ObjectStore
from services.engine.models.checkpoint import checkpoint_digest
from services.model_source.errors import SourceRejected
from services.model_source.fetch import fetch
from services.model_source.settings import ModelSourceSettings
from tests.integration.conftest import ACCESS_KEY, SECRET_KEY
from tests.integration.model_servers import (
    REPOSITORY,
    TOKEN,
    BreakingLine,
    Hub,
    checkpoint_files,
    serving,
    stored_checkpoint,
)
from tests.integration.servers import RunningServer

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "models" / "tiny"
DIGEST = checkpoint_digest(TINY)
WANTED = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model-mtp.safetensors",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
Make = Callable[..., ModelSourceSettings]


@pytest.fixture
def bucket(store: ObjectStore, settings: CommonSettings) -> Minio:
    """A client; the bucket of the test has the tiny model under models/tiny."""
    return stored_checkpoint(settings, TINY, "models/tiny")


@pytest.fixture
def of_s3(s3: RunningServer, bucket: Minio, settings: CommonSettings, tmp_path: Path) -> Make:
    def make(**changes: object) -> ModelSourceSettings:
        values: dict[str, object] = {
            "model": tmp_path / "volume" / "tiny",
            "model_source": f"s3://{settings.s3_bucket}/models/tiny",
            "model_digest": DIGEST,
            "model_s3_endpoint": s3.address,
            "model_s3_access_key": SecretStr(ACCESS_KEY),
            "model_s3_secret_key": SecretStr(SECRET_KEY),
            "model_attempts": 2,
        }
        return ModelSourceSettings(**(values | changes))  # type: ignore[arg-type]

    return make


@pytest.fixture
def line(s3: RunningServer) -> Iterator[BreakingLine]:
    line = BreakingLine(s3.address)
    yield line
    line.close()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving(Hub(checkpoint_files(TINY))) as hub:
        yield hub


@pytest.fixture
def of_hub(hub: Hub, tmp_path: Path) -> Make:
    def make(**changes: object) -> ModelSourceSettings:
        values: dict[str, object] = {
            "model": tmp_path / "tiny",
            "model_source": f"hf://{REPOSITORY}",
            "model_digest": DIGEST,
            "hf_endpoint": hub.endpoint,
            "model_attempts": 2,
        }
        return ModelSourceSettings(**(values | changes))  # type: ignore[arg-type]

    return make


def refusal(settings: ModelSourceSettings) -> str:
    with pytest.raises(SourceRejected) as caught:
        fetch(settings)
    assert "\n" not in caught.value.message
    return caught.value.message


def present(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if not path.name.startswith(".")}


class TestS3:
    def test_fetches_what_belongs_to_a_checkpoint_and_nothing_else(self, of_s3: Make) -> None:
        settings = of_s3()
        assert fetch(settings) == DIGEST
        assert present(settings.model) == WANTED
        assert checkpoint_digest(settings.model) == DIGEST
        assert not (settings.model / ".fetch").exists()

    def test_what_is_there_is_not_fetched_again_and_needs_no_source(self, of_s3: Make) -> None:
        fetch(of_s3())
        assert fetch(of_s3(model_s3_endpoint="127.0.0.1:1")) == DIGEST

    def test_a_line_that_breaks_off_is_taken_up_where_it_broke(self, of_s3: Make, line: BreakingLine) -> None:
        """Many more breaks than attempts: an attempt that brings something does not count against the others."""
        line.most_bytes = 2_000_000
        fetch(of_s3(model_s3_endpoint=line.address, model_connections=1))
        size = sum((TINY / name).stat().st_size for name in WANTED)
        assert size < line.passed < 1.25 * size

    def test_a_download_that_was_given_up_is_resumed_by_the_next_process(self, of_s3: Make, line: BreakingLine) -> None:
        line.most_bytes = 5_000_000
        settings = of_s3(model_s3_endpoint=line.address, model_connections=1, model_attempts=1)
        assert "gave up after 1 attempts" in refusal(settings)
        left = settings.model / ".fetch" / "model.safetensors.part"
        have = left.stat().st_size
        assert have > 1_000_000
        assert present(settings.model) == set()
        line.most_bytes, line.passed = 0, 0
        assert fetch(settings) == DIGEST
        assert line.passed < sum((TINY / name).stat().st_size for name in WANTED) - have + 200_000

    def test_a_corrupt_object_replaces_nothing_and_only_it_is_fetched_again(
        self, of_s3: Make, bucket: Minio, line: BreakingLine, settings: CommonSettings
    ) -> None:
        good = (TINY / "model.safetensors").read_bytes()
        bad = good[:-1] + bytes([good[-1] ^ 1])
        key = "models/tiny/model.safetensors"
        wanted = of_s3(model_s3_endpoint=line.address)
        wanted.model.mkdir(parents=True)
        for name in WANTED:
            shutil.copy(TINY / name, wanted.model / name)
        old = (wanted.model / "tokenizer_config.json", wanted.model / "model.safetensors")
        other = "0" * 64
        assert DIGEST in refusal(of_s3(model_digest=other))
        assert all(path.is_file() for path in old)
        assert checkpoint_digest(wanted.model) == DIGEST

        shutil.rmtree(wanted.model)
        bucket.put_object(settings.s3_bucket, key, io.BytesIO(bad), len(bad))
        message = refusal(wanted)
        assert message.startswith("TEMPER_MODEL_DIGEST (engine.model.digest): ")
        assert DIGEST in message
        assert present(wanted.model) == set()
        line.passed = 0
        refusal(wanted)
        assert line.passed < 100_000, "the same corrupt object was fetched again"
        bucket.put_object(settings.s3_bucket, key, io.BytesIO(good), len(good))
        line.passed = 0
        assert fetch(wanted) == DIGEST
        assert len(good) < line.passed < len(good) + 200_000

    def test_what_the_source_no_longer_has_is_not_part_of_the_checkpoint(
        self, of_s3: Make, bucket: Minio, settings: CommonSettings
    ) -> None:
        key = "models/tiny/model-9.safetensors"
        bucket.put_object(settings.s3_bucket, key, io.BytesIO(b"x"), 1)
        wanted = of_s3()
        message = refusal(wanted)
        assert message.startswith("TEMPER_MODEL_SOURCE (engine.model.source): s3://")
        assert "has no good checkpoint" in message
        bucket.remove_object(settings.s3_bucket, key)
        assert fetch(wanted) == DIGEST
        assert present(wanted.model) == WANTED

    def test_weights_of_another_sharding_are_removed_with_the_checkpoint_they_belong_to(self, of_s3: Make) -> None:
        settings = of_s3()
        settings.model.mkdir(parents=True)
        stale = settings.model / "model-00001-of-00002.safetensors"
        stale.write_bytes(b"old")
        kept = settings.model / "notes.txt"
        kept.write_text("of the operator")
        fetch(settings)
        assert not stale.exists()
        assert kept.exists()

    def test_two_at_once_on_one_volume_fetch_once(self, of_s3: Make, line: BreakingLine) -> None:
        settings = of_s3(model_s3_endpoint=line.address)
        digests: list[str] = []
        threads = [threading.Thread(target=lambda: digests.append(fetch(settings))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert digests == [DIGEST] * 3
        assert line.passed < 1.25 * sum((TINY / name).stat().st_size for name in WANTED)

    def test_unchecked_takes_what_is_there_and_skips_it_the_second_time(
        self, of_s3: Make, line: BreakingLine, bucket: Minio, settings: CommonSettings
    ) -> None:
        unchecked = of_s3(model_digest="unchecked", model_s3_endpoint=line.address)
        assert fetch(unchecked) == DIGEST
        line.passed = 0
        assert fetch(unchecked) == DIGEST
        assert line.passed < 200_000
        changed = (TINY / "config.json").read_bytes() + b"\n"
        bucket.put_object(settings.s3_bucket, "models/tiny/config.json", io.BytesIO(changed), len(changed))
        fetch(unchecked)
        assert (unchecked.model / "config.json").read_bytes() == changed

    def test_only_the_shards_of_the_index_are_fetched(
        self, of_s3: Make, bucket: Minio, settings: CommonSettings
    ) -> None:
        names = {"a": "model.safetensors", "b": "model-mtp.safetensors"}
        index = json.dumps({"weight_map": names}).encode()
        key = "models/tiny/model.safetensors.index.json"
        bucket.put_object(settings.s3_bucket, key, io.BytesIO(index), len(index))
        bucket.put_object(settings.s3_bucket, "models/tiny/consolidated.safetensors", io.BytesIO(b"twice"), 5)
        wanted = of_s3()
        fetch(wanted)
        assert present(wanted.model) == WANTED | {"model.safetensors.index.json"}

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            (
                {"model_s3_endpoint": "127.0.0.1:1"},
                "TEMPER_MODEL_SOURCE (engine.model.source): gave up after 2 attempts",
            ),
            (
                {"model_source": "s3://no-such-bucket/x"},
                "TEMPER_MODEL_SOURCE (engine.model.source): s3://no-such-bucket",
            ),
            ({"model_s3_secret_key": SecretStr("wrong")}, "TEMPER_MODEL_S3_SECRET_KEY"),
            ({"model_source": "https://x/y"}, "'https://x/y' is neither s3://bucket/prefix nor hf://"),
            ({"model_source": "s3://Bad_Bucket/y"}, "is neither s3://"),
        ],
    )
    def test_a_source_that_cannot_be_read(self, of_s3: Make, changes: dict[str, object], words: str) -> None:
        assert words in refusal(of_s3(**changes))

    def test_an_empty_prefix_and_one_without_a_tokenizer(
        self, of_s3: Make, bucket: Minio, settings: CommonSettings
    ) -> None:
        place = f"s3://{settings.s3_bucket}/models/none"
        assert "no config.json, no tokenizer.json, no *.safetensors" in refusal(of_s3(model_source=place))
        bucket.remove_object(settings.s3_bucket, "models/tiny/tokenizer.json")
        message = refusal(of_s3())
        assert message.startswith("TEMPER_MODEL_SOURCE (engine.model.source): s3://")
        assert "has no tokenizer.json: it has chat_template.jinja" in message

    def test_a_directory_that_cannot_be_written(self, of_s3: Make, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        assert refusal(of_s3(model=tmp_path / "file" / "x")).startswith("TEMPER_MODEL: ")


class TestHub:
    def test_large_files_come_from_another_host_which_never_sees_the_token(self, hub: Hub, of_hub: Make) -> None:
        hub.token = TOKEN
        settings = of_hub(hf_token=SecretStr(TOKEN))
        assert fetch(settings) == DIGEST
        assert present(settings.model) == WANTED
        assert len(hub.seen("storage", "/blobs/")) == 2
        assert not [headers for headers in hub.seen("storage", "") if "authorization" in headers]
        assert all(headers["authorization"] == f"Bearer {TOKEN}" for headers in hub.seen("hub", ""))
        assert not hub.seen("hub", ".bin")

    @pytest.mark.parametrize("revision", ["v1", "refs/pr/1"])
    def test_a_revision_is_pinned_to_its_commit(self, of_hub: Make, revision: str) -> None:
        assert fetch(of_hub(model_source=f"hf://{REPOSITORY}@{revision}")) == DIGEST

    def test_a_storage_that_hangs_up_is_asked_for_the_rest(self, hub: Hub, of_hub: Make) -> None:
        hub.break_after = 3_000_000
        assert fetch(of_hub()) == DIGEST
        ranges = [headers["range"] for headers in hub.seen("storage", "/model.safetensors") if "range" in headers]
        assert ranges == ["bytes=3000000-", "bytes=6000000-", "bytes=9000000-"]

    def test_bytes_that_are_not_those_of_the_list_are_refused(self, hub: Hub, of_hub: Make) -> None:
        hub.corrupt = {"model-mtp.safetensors"}
        message = refusal(of_hub(model_digest="unchecked"))
        assert "gives other bytes of model-mtp.safetensors than it says" in message
        assert len(hub.seen("storage", "model-mtp")) == 2, "once more, in case it was the line"

    def test_a_name_that_leaves_the_directory_is_refused(self, hub: Hub, of_hub: Make) -> None:
        hub.files["../evil.safetensors"] = b"x"
        assert "it has a file called '../evil.safetensors'" in refusal(of_hub())

    def test_a_volume_that_is_too_small(self, hub: Hub, of_hub: Make) -> None:
        hub.sizes["model.safetensors"] = 10**17
        message = refusal(of_hub())
        assert re.match(r"TEMPER_MODEL: the volume of \S+ has [\d,]+ MiB free, and 95,367,4\d\d,\d{3} MiB", message)
        assert not hub.seen("storage", "")

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"model_source": "hf://acme/none"}, "answers 404: no such repository, revision or file"),
            ({"model_source": f"hf://{REPOSITORY}@gone"}, "answers 404"),
            ({"hf_token": SecretStr("wrong")}, "answers 401: no such repository, or one that needs a token"),
        ],
    )
    def test_what_the_hub_does_not_give(self, hub: Hub, of_hub: Make, changes: dict[str, object], words: str) -> None:
        hub.token = TOKEN
        message = refusal(of_hub(**({"hf_token": SecretStr(TOKEN)} | changes)))
        assert message.startswith("TEMPER_MODEL_SOURCE (engine.model.source): hf://")
        assert words in message
        assert len(hub.requests) == 1, "asked again, although no attempt can help"


class TestCommand:
    def run(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """The command as the init container starts it."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith("TEMPER_")}
        command = [sys.executable, "-m", "services.model_source", *arguments]
        return subprocess.run(command, env=clean | env, cwd=ROOT, capture_output=True, text=True, timeout=60)

    def test_prints_the_digest_of_a_directory(self) -> None:
        done = self.run("--digest", str(TINY))
        assert (done.returncode, done.stdout) == (0, f"{DIGEST}\n")

    def test_fetches_and_logs_json(self, hub: Hub, tmp_path: Path) -> None:
        source = {"TEMPER_MODEL_SOURCE": f"hf://{REPOSITORY}", "TEMPER_HF_ENDPOINT": hub.endpoint}
        done = self.run(TEMPER_MODEL=str(tmp_path / "m"), TEMPER_MODEL_DIGEST=f"sha256:{DIGEST.upper()}", **source)
        assert done.returncode == 0, done.stderr
        events = [json.loads(line) for line in done.stderr.splitlines()]
        assert [event["event"] for event in events] == ["model_source_begins", "model_source_done"]
        assert events[-1]["digest"] == DIGEST

    def test_each_mistake_is_one_line_with_the_variable_and_the_value_of_the_chart(self, tmp_path: Path) -> None:
        done = self.run(TEMPER_MODEL=str(tmp_path), TEMPER_MODEL_SOURCE="s3://b/x")
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == "temper model: TEMPER_MODEL_DIGEST (engine.model.digest): Field required\n"
        done = self.run(TEMPER_MODEL=str(tmp_path), TEMPER_MODEL_SOURCE="s3://b/x", TEMPER_MODEL_DIGEST="abc")
        assert done.returncode == 1
        assert done.stderr.startswith("temper model: TEMPER_MODEL_DIGEST (engine.model.digest): Value error, must be")
        assert len(done.stderr.splitlines()) == 1

    def test_ends_at_sigterm_with_a_source_that_is_silent(self, tmp_path: Path) -> None:
        """In a container it is process 1, which a signal without a handler does not end."""
        with socket.create_server(("127.0.0.1", 0)) as silent:
            silent.settimeout(30.0)
            env = os.environ | {
                "TEMPER_MODEL": str(tmp_path),
                "TEMPER_MODEL_SOURCE": f"hf://{REPOSITORY}",
                "TEMPER_MODEL_DIGEST": DIGEST,
                "TEMPER_HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}",
            }
            with subprocess.Popen([sys.executable, "-m", "services.model_source"], env=env, cwd=ROOT) as process:
                connection, _ = silent.accept()
                with connection:
                    process.terminate()
                    assert process.wait(10.0) == 143

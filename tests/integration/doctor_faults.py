"""A healthy place for the doctor, and faults that are planted in it."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import redis

from cli.doctor.check import examine
from cli.doctor.findings import Checked, Report
from cli.doctor.place import Place
from cli.doctor.registry import CHECKS
from services.common.security.api_keys import KeyFile, Scope, dump_keys, new_entry, new_key
from services.common.settings import CommonSettings
from tests.certificates import DAY, Authority, environment
from tests.stack import ROOT, TINY
from tests.unit.cli.server import Reply, Seen, serving

BY_NAME = {check.name: check for check in CHECKS}
SCHEMA = jsonschema_rs.validator_for(json.loads((ROOT / "cli" / "doctor" / "report.schema.json").read_text()))


@dataclass
class Bench:
    """A healthy place in which one thing is broken at a time."""

    directory: Path
    settings: CommonSettings
    """Of the real Redis and S3."""
    patch: pytest.MonkeyPatch
    scope: contextlib.ExitStack
    model: Path = TINY
    url: str | None = None
    port: int = 0
    data: Path = field(init=False)

    def __post_init__(self) -> None:
        self.data = self.directory / "data"

    def set(self, **variables: object) -> None:
        for name, value in variables.items():
            self.patch.setenv(f"TEMPER_{name.upper()}", str(value))

    def copy_of_model(self) -> Path:
        self.model = self.directory / "model"
        shutil.copytree(TINY, self.model, ignore=shutil.ignore_patterns("recipe", "suites", "*.py", "*.md"))
        return self.model

    def redis(self) -> redis.Redis:
        return redis.Redis.from_url(self.settings.redis_url.get_secret_value(), decode_responses=True)

    def configure_redis(self, **values: str) -> None:
        """Until the end of the test."""
        client = self.scope.enter_context(self.redis())
        for name, value in values.items():
            name = name.replace("_", "-")
            self.scope.callback(client.config_set, name, client.config_get(name)[name])
            client.config_set(name, value)

    def serve(self, answer: Callable[[Seen], Reply]) -> str:
        url, _ = self.scope.enter_context(serving(answer))
        return url

    def distribution(self, name: str, number: str, *lines: str) -> None:
        """Installs a package's metadata before all others."""
        directory = self.directory / "site" / f"{name}-{number}.dist-info"
        directory.mkdir(parents=True)
        text = "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {number}", *lines])
        (directory / "METADATA").write_text(text + "\n")
        self.patch.syspath_prepend(str(directory.parent))

    def key_file(self, *, expires: timedelta | None = None, mode: int = 0o600, scopes: tuple[Scope, ...]) -> Path:
        file = self.directory / "keys.json"
        ends = None if expires is None else datetime.now(UTC) + expires
        file.write_bytes(dump_keys(KeyFile(keys=(new_entry(new_key(), name="me", scopes=scopes, expires_at=ends),))))
        file.chmod(mode)
        self.set(api_keys_file=file)
        return file

    def look(self, check: str, *, fix: bool = False) -> Checked:
        place = Place(self.model, self.data, self.url, "127.0.0.1", self.port or 8420)
        (entry,) = examine(place, [BY_NAME[check]], fix=fix)
        SCHEMA.validate(Report("0", [entry]).document())
        return entry


FAULTS: dict[str, tuple[str, str, Callable[[Bench], object]]] = {}
"""Name → the check that finds it, words of its sentence, and how it is planted."""


def fault(check: str, words: str) -> Callable[[Callable[[Bench], object]], Callable[[Bench], object]]:
    def add(plant: Callable[[Bench], object]) -> Callable[[Bench], object]:
        FAULTS[plant.__name__] = (check, words, plant)
        return plant

    return add


@fault("python", "Temper needs >=3.99")
def python_too_old(bench: Bench) -> None:
    bench.distribution("temper", "1.0", "Requires-Python: >=3.99")


@fault("packages", "packages are missing or unfit: no-such-package>=2")
def package_missing(bench: Bench) -> None:
    bench.distribution("temper", "1.0", "Requires-Dist: no-such-package>=2")


@fault("packages", "redis>=6 (there is 5.0)")
def package_too_old(bench: Bench) -> None:
    bench.distribution("redis", "5.0")


@fault("packages.pins", "structlog 24.1.0 (tested:")
def package_not_the_tested_one(bench: Bench) -> None:
    bench.distribution("structlog", "24.1.0")


@fault("settings", "TEMPER_MAX_NUM_SEQS: ")
def setting_of_another_type(bench: Bench) -> None:
    bench.set(max_num_seqs="many")


@fault("settings.names", "TEMPER_MAX_NUM_SEQ (is it TEMPER_MAX_NUM_SEQS?)")
def setting_mistyped(bench: Bench) -> None:
    bench.set(max_num_seq=3)


@fault("port", "is in use by")
def port_taken(bench: Bench) -> None:
    listener = bench.scope.enter_context(socket.create_server(("127.0.0.1", 0)))
    threading.Thread(target=_close_whoever_comes, args=(listener,), daemon=True).start()
    bench.port = listener.getsockname()[1]


def _close_whoever_comes(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            listener.accept()[0].close()


@fault("redis", "is away")
def redis_away(bench: Bench) -> None:
    bench.set(redis_url="redis://127.0.0.1:1/0")


@fault("redis", "refuses user and password")
def redis_password(bench: Bench) -> None:
    bench.set(redis_url=bench.settings.redis_url.get_secret_value().replace("redis://", "redis://me:wrong@"))


@fault("redis", "is no address")
def redis_url_of_another_kind(bench: Bench) -> None:
    bench.set(redis_url="redis+sentinel://:secret@127.0.0.1:1")


@fault("redis.persistence", "keeps no append-only file")
def redis_forgets(bench: Bench) -> None:
    bench.configure_redis(appendonly="no")


@fault("redis.eviction", "evicts keys when it is full")
def redis_evicts(bench: Bench) -> None:
    bench.configure_redis(maxmemory_policy="allkeys-lru")


@fault("redis.memory", "and then refuses writes")
def redis_full(bench: Bench) -> None:
    with bench.redis() as client:
        used: Any = client.info("memory")
    bench.configure_redis(maxmemory=str(int(used["used_memory"] * 1.02)))


@fault("redis.latency", "usual is less than 1")
def redis_far_away(bench: Bench) -> None:
    host, _, port = bench.settings.redis_url.get_secret_value().removeprefix("redis://").partition(":")
    listener = bench.scope.enter_context(socket.create_server(("127.0.0.1", 0)))
    threading.Thread(target=_slow_wire, args=(listener, host, int(port.split("/")[0])), daemon=True).start()
    bench.set(redis_url=f"redis://127.0.0.1:{listener.getsockname()[1]}/0")


def _slow_wire(listener: socket.socket, host: str, port: int) -> None:
    with contextlib.suppress(OSError), listener.accept()[0] as near, socket.create_connection((host, port)) as far:
        while data := near.recv(65536):
            time.sleep(0.006)
            far.sendall(data)
            near.sendall(far.recv(65536))


@fault("s3", "does not answer")
def s3_away(bench: Bench) -> None:
    bench.set(s3_endpoint="127.0.0.1:1")


@fault("s3.permissions", "refuses to write")
def s3_keys(bench: Bench) -> None:
    bench.set(s3_secret_key="another")


@fault("s3.permissions", "has no bucket")
def s3_bucket(bench: Bench) -> None:
    # SeaweedFS makes a bucket that is written to; others do not.
    error = "<Error><Code>NoSuchBucket</Code><Message>none</Message></Error>"
    url = bench.serve(lambda _: Reply(error, 404, "application/xml"))
    bench.set(s3_endpoint=url.removeprefix("http://"))


class _Careless(BaseHTTPRequestHandler):
    """An S3 server that takes every write, and whose clock is an hour ahead."""

    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response_only(204 if self.command == "DELETE" else 200)
        self.send_header("Date", format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True))
        self.send_header("ETag", '"00"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_PUT = do_HEAD = do_DELETE = do_GET = _answer  # noqa: N815

    def log_message(self, format: str, *args: object) -> None: ...


@fault("s3.conditions", "ignores If-None-Match")
def s3_without_conditions(bench: Bench) -> None:
    server = bench.scope.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), _Careless))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    bench.scope.callback(server.shutdown)
    bench.set(s3_endpoint=f"127.0.0.1:{server.server_address[1]}")


@fault("s3.clock", "s ahead of this one")
def s3_clock(bench: Bench) -> None:
    s3_without_conditions(bench)


@fault("model", "does not exist: the model directory needs a config.json")
def model_without_config(bench: Bench) -> None:
    (bench.copy_of_model() / "config.json").unlink()


@fault("model", "lies outside the file")
def model_cut_off(bench: Bench) -> None:
    with (bench.copy_of_model() / "model.safetensors").open("r+b") as file:
        file.truncate(5_000_000)


@fault("model", "names the shard 'model-2.safetensors'")
def model_without_a_shard(bench: Bench) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (bench.copy_of_model() / "model.safetensors.index.json").write_text(json.dumps(index))


@fault("model", "is not supported")
def model_of_another_kind(bench: Bench) -> None:
    (bench.copy_of_model() / "config.json").write_text('{"architectures": ["Other"], "model_type": "other"}')


@fault("model.digest", "TEMPER_MODEL_DIGEST is")
def model_of_another_digest(bench: Bench) -> None:
    bench.set(model_digest="0" * 64)


@fault("model.digest", "was fetched with 7 bytes")
def model_changed_since_it_was_fetched(bench: Bench) -> None:
    record = {"source": "hf://a/b", "files": [["model.safetensors", 7, "x"]]}
    (bench.copy_of_model() / ".source.json").write_text(json.dumps(record))


@fault("model.tokenizer", "is malformed")
def tokenizer_broken(bench: Bench) -> None:
    (bench.copy_of_model() / "tokenizer.json").write_text("{}")


@fault("model.tokenizer", "they do not belong together")
def tokenizer_of_another_model(bench: Bench) -> None:
    file = bench.copy_of_model() / "config.json"
    file.write_text(file.read_text().replace('"vocab_size": 2048', '"vocab_size": 1024'))


@fault("model.template", "has no chat template")
def template_missing(bench: Bench) -> None:
    (bench.copy_of_model() / "chat_template.jinja").unlink()


@fault("model.template", "leaves out what the user says")
def template_of_something_else(bench: Bench) -> None:
    (bench.copy_of_model() / "chat_template.jinja").write_text("Hello")


@fault("disk.write", "is a file")
def data_directory_is_a_file(bench: Bench) -> None:
    bench.data.write_text("")


@fault("disk.tier", "the disk tier may take")
def disk_tier_too_large(bench: Bench) -> None:
    bench.set(tiers="host,disk", tier_disk_bytes="900TiB")


@fault("keys", "is not a key file")
def keys_malformed(bench: Bench) -> None:
    bench.key_file(scopes=(Scope.ADMIN,)).write_text('{"keys": 3}')


@fault("keys", "cannot be read")
def keys_missing(bench: Bench) -> None:
    bench.key_file(scopes=(Scope.ADMIN,)).unlink()


@fault("keys", "can be read by others")
def keys_open_to_others(bench: Bench) -> None:
    bench.key_file(scopes=(Scope.ADMIN,), mode=0o644)


@fault("keys", "none of the 1 keys")
def keys_expired(bench: Bench) -> None:
    bench.key_file(scopes=(Scope.ADMIN,), expires=-timedelta(days=1))


@fault("keys", "has the scope admin")
def keys_without_admin(bench: Bench) -> None:
    bench.key_file(scopes=(Scope.INFERENCE,))


def certificate(bench: Bench, **options: Any) -> None:
    files = Authority("ours").issue(bench.directory / "tls", "engine", **options)
    files.key.chmod(0o600)
    for name, value in environment(files).items():
        bench.patch.setenv(name, value)


@fault("certificates", "did not sign")
def certificate_of_another_authority(bench: Bench) -> None:
    certificate(bench, ca=Authority("another").pem)


@fault("certificates", "ends on")
def certificate_ends_soon(bench: Bench) -> None:
    certificate(bench, ends=3 * DAY)


@fault("certificates.authorities", "is no file of certificates")
def authorities_are_none(bench: Bench) -> None:
    file = bench.directory / "ca.pem"
    file.write_text("nothing")
    bench.set(ca_bundle=file)


@fault("telemetry", "no collector speaks gRPC")
def collector_away(bench: Bench) -> None:
    bench.set(otlp_endpoint="http://127.0.0.1:1")


@fault("server", "no Temper at http://127.0.0.1:1")
def server_away(bench: Bench) -> None:
    bench.url = "http://127.0.0.1:1"


@fault("server", "is no Temper")
def server_is_something_else(bench: Bench) -> None:
    bench.url = bench.serve(lambda _: Reply({}))


@fault("server", "no engine is ready (10.0.0.1:50051: refused)")
def server_without_an_engine(bench: Bench) -> None:
    engines = [{"address": "10.0.0.1:50051", "ready": False, "error": "refused"}]
    health = {"status": "degraded", "engines": engines, "redis": "ok", "object_store": "ok"}
    bench.url = bench.serve(lambda _: Reply(health))


@fault("server.version", "the server is Temper 9.9")
def server_of_another_version(bench: Bench) -> None:
    bench.url = bench.serve(lambda _: Reply({"version": "9.9"}))


@fault("server.request", "a completion failed: out of memory")
def server_that_fails(bench: Bench) -> None:
    def answer(seen: Seen) -> Reply:
        if seen.method == "GET":
            return Reply({"data": [{"id": "m"}]})
        return Reply({"error": {"message": "out of memory"}}, 500)

    bench.url = bench.serve(answer)

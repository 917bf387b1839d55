"""Servers with certificates of an authority that nobody knows: all that leaves a process trusts it by TEMPER_CA_BUNDLE,
which is what the chart's caBundle sets, and none of it without."""

from __future__ import annotations

import http.server
import json
import ssl
import threading
from collections.abc import Iterator

import grpc
import pytest
import redis
from pydantic import SecretStr

from services.common.errors import Unavailable
from services.common.jobs.scorers.sample import Sample
from services.common.jobs.scorers.webhook_client import WebhookScorer
from services.common.security.tls import TlsFiles
from services.common.settings import CommonSettings
from services.common.storage.object_store import ObjectStore
from services.common.storage.redis import connect, connect_async
from services.common.telemetry import tracing
from services.pod.training.thread import webhooks_of
from services.trainer.settings import TrainerSettings
from tests.certificates import Authority
from tests.integration.proxies import Noting, Proxy, serving
from tests.integration.servers import RunningServer
from tests.otlp import Collector
from tests.tls_front import TlsFront

NOT_TRUSTED = r"(?i)certificate.verify.failed"
SECRET = "0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    """Certificate and key of a server, and the authority's own certificate."""
    return Authority("own-ca").issue(tmp_path_factory.mktemp("own-ca"), "localhost")


@pytest.fixture
def trusted(files: TlsFiles, monkeypatch: pytest.MonkeyPatch) -> TlsFiles:
    """As a pod has it: the variable, and the file that it names."""
    monkeypatch.setenv("TEMPER_CA_BUNDLE", str(files.ca))
    return files


def redis_behind(front: TlsFront) -> CommonSettings:
    return CommonSettings(redis_url=SecretStr(f"rediss://{front.address}/0"))


async def test_redis(trusted: TlsFiles, valkey: RunningServer) -> None:
    with TlsFront(trusted, valkey.address) as front:
        settings = redis_behind(front)
        with connect(settings) as client:
            assert client.set("a", "b")
        asking = connect_async(settings)
        assert await asking.get("a") == "b"
        await asking.aclose()
        assert front.handshakes == 2


async def test_redis_of_an_authority_that_nobody_named(files: TlsFiles, valkey: RunningServer) -> None:
    with TlsFront(files, valkey.address) as front:
        settings = redis_behind(front)
        with connect(settings) as client, pytest.raises(redis.ConnectionError, match=NOT_TRUSTED):
            client.ping()
        asking = connect_async(settings)
        with pytest.raises(redis.ConnectionError, match=NOT_TRUSTED):
            await asking.ping()
        await asking.aclose()


def store_behind(front: TlsFront, settings: CommonSettings) -> ObjectStore:
    """With what the environment says now of authorities."""
    bundle = CommonSettings().ca_bundle
    update = {"s3_endpoint": front.address, "s3_secure": True, "ca_bundle": bundle}
    return ObjectStore(settings.model_copy(update=update))


def test_the_object_store(trusted: TlsFiles, s3: RunningServer, settings: CommonSettings) -> None:
    with TlsFront(trusted, s3.address) as front:
        store = store_behind(front, settings)
        store.check()
        store.put("a", b"b" * 100_000)
        assert store.get("a").data == b"b" * 100_000
        assert front.handshakes


def test_an_object_store_of_an_authority_that_nobody_named(
    files: TlsFiles, s3: RunningServer, settings: CommonSettings
) -> None:
    with TlsFront(files, s3.address) as front:
        with pytest.raises(Unavailable, match=NOT_TRUSTED):
            store_behind(front, settings).check()
        assert not front.handshakes


class _Grader(http.server.BaseHTTPRequestHandler):
    """Half a point for each sample."""

    def do_POST(self) -> None:
        samples = json.loads(self.rfile.read(int(self.headers["content-length"])))["samples"]
        body = json.dumps({"rewards": [0.5] * len(samples)}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def grader(files: TlsFiles) -> Iterator[str]:
    """URL of a webhook."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Grader)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"https://127.0.0.1:{server.server_address[1]}/grade"
    server.shutdown()
    server.server_close()


def scored(url: str) -> list[float]:
    """By a webhook of a pod that has the environment."""
    settings = TrainerSettings(reward_webhooks=url, reward_webhook_secret=SecretStr(SECRET), reward_webhook_attempts=1)
    scorer = WebhookScorer(webhooks_of(settings), url, "reward")
    return scorer.score([Sample("p", "c", 1)], lambda: None)


@pytest.mark.usefixtures("trusted")
def test_webhooks(grader: str) -> None:
    assert scored(grader) == [0.5]


def test_webhooks_of_an_authority_that_nobody_named(grader: str) -> None:
    with pytest.raises(Unavailable, match=NOT_TRUSTED):
        scored(grader)


def test_the_collector_of_traces(files: TlsFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_CLOSE_SECONDS", 0.5)  # of which the one that is not trusted takes all
    credentials = grpc.ssl_server_credentials([(files.key.read_bytes(), files.cert.read_bytes())])
    with Collector(credentials) as collector:
        monkeypatch.setenv("TEMPER_OTLP_ENDPOINT", collector.endpoint)
        for name, bundle in (("untrusted", ""), ("trusted", str(files.ca))):
            monkeypatch.setenv("TEMPER_CA_BUNDLE", bundle)
            tracer = tracing.open_tracer(CommonSettings(), "gateway")
            tracer.start(name).end()
            tracer.close()
        assert [span.name for span in collector.spans] == ["trusted"]


def test_the_collector_of_traces_through_the_proxy(trusted: TlsFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    credentials = grpc.ssl_server_credentials([(trusted.key.read_bytes(), trusted.cert.read_bytes())])
    proxy = Noting(Proxy)
    with Collector(credentials) as collector, serving(proxy) as through:
        monkeypatch.setenv("TEMPER_OTLP_ENDPOINT", collector.endpoint)
        monkeypatch.setenv("HTTPS_PROXY", f"http://me:pw@127.0.0.1:{through}")
        for name, direct in (("through it", ""), ("directly", "127.0.0.1")):
            monkeypatch.setenv("NO_PROXY", direct)
            tracer = tracing.open_tracer(CommonSettings(), "gateway")
            tracer.start(name).end()
            tracer.close()
            assert collector.spans[-1].name == name
            assert proxy.seen == [(collector.endpoint.removeprefix("https://"), "Basic bWU6cHc=")]

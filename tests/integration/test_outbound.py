"""Ways out of a cluster: a real proxy, an authority of one's own, and credentials that an identity has."""

from __future__ import annotations

import http.server
import json
import socket
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
import urllib3
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from pydantic import SecretStr

from services.common.errors import Unavailable
from services.common.security.outbound import authorities, pool, proxy_for
from services.common.security.tls import Certificates
from services.common.settings import CommonSettings
from services.common.storage.object_store import ObjectStore
from services.common.storage.s3_connection import AmbientCredentials
from services.gateway.engines.channel import Channels
from services.model_source.errors import SourceBroken
from services.model_source.hub import HubSource
from services.model_source.settings import ModelSourceSettings
from tests.certificates import Authority
from tests.integration.proxies import Noting, Proxy, serving

COMMIT = "0" * 40


class _Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body: object = {"sha": COMMIT} if "/revision/" in self.path else []
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """A hub over TLS, of an authority that nobody knows: its port, and the file of the authority."""
    files = Authority("own-ca").issue(tmp_path, "hub.example.internal")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)
    server = Noting(_Hub)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    with serving(server) as port:
        yield port, files.ca


def source(tmp_path: Path, port: int, **settings: object) -> HubSource:
    values = {
        "model": tmp_path,
        "model_source": "hf://a/b",
        "model_digest": "unchecked",
        "hf_endpoint": f"https://hub.example.internal:{port}",
        "model_timeout_seconds": 5,
        **settings,
    }
    return HubSource(ModelSourceSettings.model_validate(values), "a/b", "main")


def test_a_checkpoint_comes_through_the_proxy_from_an_authority_of_ones_own(
    hub: tuple[int, Path], tmp_path: Path
) -> None:
    port, ca = hub
    proxy = Noting(Proxy)
    with serving(proxy) as through:
        found = source(tmp_path, port, https_proxy=f"http://me:pw@127.0.0.1:{through}", ca_bundle=ca)
        assert found.files() == []
    assert {path for path, _ in proxy.seen} == {f"hub.example.internal:{port}"}
    assert {login for _, login in proxy.seen} == {"Basic bWU6cHc="}


def test_an_authority_that_nobody_named_is_not_trusted(hub: tuple[int, Path], tmp_path: Path) -> None:
    with serving(Noting(Proxy)) as through, pytest.raises(SourceBroken, match=r"certificate|CERTIFICATE"):
        source(tmp_path, hub[0], https_proxy=f"http://127.0.0.1:{through}").files()


def test_the_environment_has_the_usual_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", ".svc,10.0.0.1")
    settings = CommonSettings()
    assert proxy_for(settings, "https://huggingface.co/x") == "http://proxy:3128"
    assert proxy_for(settings, "https://demo-s3.ai.svc:9000") is None
    assert proxy_for(settings, "https://10.0.0.1") is None
    assert proxy_for(settings, "http://example.com") is None
    assert "proxy:3128" not in str(settings), "it may hold a password"
    assert isinstance(pool(settings, "https://huggingface.co"), urllib3.ProxyManager)
    assert not isinstance(pool(settings, "https://x.svc"), urllib3.ProxyManager)


def test_public_authorities_stay(tmp_path: Path) -> None:
    bundle = Authority("own-ca").issue(tmp_path, "x").ca
    found = authorities(CommonSettings(ca_bundle=bundle))
    assert found is not None
    assert bundle.read_bytes() in found
    assert found.count(b"BEGIN CERTIFICATE") > 50
    assert authorities(CommonSettings()) is None


PROXIES = ("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy", "grpc_proxy")
"""The first two are what the chart sets; gRPC reads the others."""


async def test_engines_are_not_reached_through_the_proxy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """gRPC would take the environment's for every channel. A gateway that asked a proxy for a pod would find none."""
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    files = Authority("own-ca").issue(tmp_path, "localhost")
    certificates = Certificates(files)
    plain = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    secure = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', certificates.server_credentials())}"
    await server.start()
    proxy = Noting(Proxy)

    async def asked(channel: grpc.aio.Channel) -> int:
        async with channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
            return int(answer.status)

    with serving(proxy) as through:
        for name in PROXIES:
            monkeypatch.setenv(name, f"http://127.0.0.1:{through}")
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        assert await asked(Channels().open(plain)) == health_pb2.HealthCheckResponse.SERVING
        assert await asked(Channels(certificates).open(secure)) == health_pb2.HealthCheckResponse.SERVING
        assert proxy.seen == []
        # What any other channel does: the proxy is there and would be taken.
        assert await asked(grpc.aio.insecure_channel(plain)) == health_pb2.HealthCheckResponse.SERVING
        assert [path for path, _ in proxy.seen] == [plain]
    await server.stop(0)


class _Identity(http.server.BaseHTTPRequestHandler):
    """What EKS Pod Identity runs on a node: credentials for who shows the pod's token."""

    keys: tuple[str, str] = ("", "")
    valid = timedelta(hours=1)

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, Noting)
        server.seen.append((self.path, self.headers.get("authorization", "")))
        ends = (datetime.now(UTC) + self.valid).strftime("%Y-%m-%dT%H:%M:%SZ")
        body = {"AccessKeyId": self.keys[0], "SecretAccessKey": self.keys[1], "Token": None, "Expiration": ends}
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.mark.usefixtures("s3")
def test_the_store_opens_to_an_identity(
    settings: CommonSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = (settings.s3_access_key.get_secret_value(), settings.s3_secret_key.get_secret_value())
    handler = type("_Ours", (_Identity,), {"keys": keys})
    server = Noting(handler)
    token = tmp_path / "token"
    token.write_text("of-this-pod")
    with serving(server) as port:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://127.0.0.1:{port}/v1/credentials")
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(token))
        # Keys that are no longer right are not looked at.
        update = {"s3_credentials": "chain", "s3_access_key": SecretStr("x"), "s3_secret_key": SecretStr("y" * 16)}
        store = ObjectStore(settings.model_copy(update=update))
        store.check()
        store.put("identity", b"x")
        assert store.get("identity").data == b"x"
    assert server.seen == [("/v1/credentials", "of-this-pod")], "asked once, as long as they are valid"


def test_no_identity_is_told(settings: CommonSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://127.0.0.1:{port}/")
    store = ObjectStore(settings.model_copy(update={"s3_credentials": "chain"}))
    with pytest.raises(Unavailable, match="TEMPER_S3_CREDENTIALS=chain"):
        store.get("x")


def test_a_web_identity_is_shown_to_the_token_service_through_the_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text("jwt")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/temper")
    proxy = Noting(_Refusing)
    with serving(proxy) as port:
        settings = CommonSettings(https_proxy=SecretStr(f"http://127.0.0.1:{port}"), s3_region="eu-1")
        with pytest.raises(OSError, match="no credentials for S3"):
            AmbientCredentials(settings).retrieve()
    assert proxy.seen[0][0] == "sts.eu-1.amazonaws.com:443"


class _Refusing(http.server.BaseHTTPRequestHandler):
    def do_CONNECT(self) -> None:
        server = self.server
        assert isinstance(server, Noting)
        server.seen.append((self.path, ""))
        self.send_error(403)

    def log_message(self, format: str, *args: object) -> None: ...

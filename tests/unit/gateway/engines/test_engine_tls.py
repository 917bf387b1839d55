"""mTLS between gateway and engine over real connections: who is refused, what is said, and renewal under load."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from services.common.pb import adapters_pb2
from services.common.security.tls import Certificates, read_material
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.engines import certificate_rotation as renewal
from services.gateway.engines.calls.adapters import AdapterCalls
from services.gateway.engines.pool import EnginePool
from services.gateway.server.app import create_app
from services.gateway.server.named_files import BadSetting
from services.gateway.settings import GatewaySettings
from tests.certificates import DAY, Authority
from tests.unit.gateway.engines.test_pool import address, ready, request, run, until
from tests.unit.gateway.fake_engine import FakeEngine, says

CA, OTHER = Authority("temper-ca"), Authority("other-ca")


@asynccontextmanager
async def engine_with(certificates: Certificates | None) -> AsyncIterator[FakeEngine]:
    engine = FakeEngine(credentials=None if certificates is None else certificates.server_credentials())
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


@asynccontextmanager
async def pool_for(
    engine: FakeEngine, certificates: Certificates | None, **settings: object
) -> AsyncIterator[EnginePool]:
    values = {"engines": address(engine), "status_interval_seconds": 0.05, **settings}
    pool = EnginePool(GatewaySettings.model_validate(values), GatewayMetrics(), certificates=certificates)
    pool.start()
    try:
        yield pool
    finally:
        await pool.stop()


def outlived(certificates: Certificates, tmp_path: Path) -> Certificates:
    """As if they had been read when they were valid, and have not been renewed."""
    files = CA.issue(tmp_path, "late", begins=-9 * DAY, ends=-DAY)
    certificates._current = read_material(files, now=datetime.now(UTC) - 2 * DAY)
    return certificates


async def error_of(pool: EnginePool) -> str:
    (client,) = pool.clients
    await until(lambda: client.last_error != "not connected yet")
    assert not client.ready
    return client.last_error


async def test_both_sides_with_certificates_of_one_ca(tmp_path: Path) -> None:
    server = Certificates(CA.issue(tmp_path / "engine", "engine.temper.svc"))
    client = Certificates(CA.issue(tmp_path / "gateway", "gateway"))
    for name in ("", "engine.temper.svc"):
        tls = {"grpc_tls_server_name": name} if name else {}
        files = {f"grpc_tls_{part}": tmp_path / part for part in ("cert", "key", "ca")}
        async with engine_with(server) as engine, pool_for(engine, client, **files, **tls) as pool:
            await until(lambda: ready(pool))
            assert await run(pool, request())


Sides = Callable[[Path], tuple[Certificates | None, Certificates | None]]


def good(path: Path) -> Certificates:
    return Certificates(CA.issue(path, "engine"))


@pytest.mark.parametrize(
    ("sides", "says_", "server_says"),
    [
        (
            lambda p: (good(p / "e"), Certificates(OTHER.issue(p / "g", "gateway"))),
            "TLS: the engine's certificate is not of the CA in TEMPER_GRPC_TLS_CA",
            "",
        ),
        (
            lambda p: (
                good(p / "e"),
                Certificates(OTHER.issue(p / "g", "gateway", ca=OTHER.pem + CA.pem)),
            ),
            "TLS: the engine closed the connection in the handshake: it refuses the certificate of this gateway",
            "unable to get local issuer certificate",
        ),
        (
            lambda p: (good(p / "e"), outlived(good(p / "g"), p / "late")),
            "TLS: the engine closed the connection in the handshake: it refuses the certificate of this gateway",
            "certificate has expired",
        ),
        (
            lambda p: (outlived(good(p / "e"), p / "late"), good(p / "g")),
            "TLS: the engine's certificate has expired",
            "",
        ),
        (lambda p: (good(p / "e"), None), "the engine closes connections without TLS: set TEMPER_GRPC_TLS_CERT", ""),
        (lambda p: (None, good(p / "g")), "TLS: the engine does not speak TLS: set TEMPER_GRPC_TLS_CERT", ""),
    ],
    ids=["foreign engine", "foreign gateway", "expired gateway", "expired engine", "no TLS here", "no TLS there"],
)
async def test_who_is_refused_hears_why(
    sides: Sides, says_: str, server_says: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server, client = sides(tmp_path)
    async with engine_with(server) as engine, pool_for(engine, client) as pool:
        said = await error_of(pool)
    assert said.startswith(says_), said
    assert str(tmp_path) not in said, "it is in /healthz, which needs no key"
    assert server_says in capfd.readouterr().err


async def test_a_certificate_for_another_name(tmp_path: Path) -> None:
    files = CA.issue(tmp_path, "engine")
    tls = {f"grpc_tls_{part}": getattr(files, part) for part in ("cert", "key", "ca")}
    certificates = Certificates(files)
    async with (
        engine_with(certificates) as engine,
        pool_for(engine, certificates, grpc_tls_server_name="somebody.else", **tls) as pool,
    ):
        assert "set TEMPER_GRPC_TLS_SERVER_NAME" in await error_of(pool)


async def test_renewal_under_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both certificates, and then also the CA, are renewed while a long answer is streamed and short ones come."""
    monkeypatch.setattr(renewal, "FOLLOW_SECONDS", 0.05)
    engine_files, gateway_files = tmp_path / "engine", tmp_path / "gateway"
    server = Certificates(CA.issue(engine_files, "engine"))
    certificates = Certificates(CA.issue(gateway_files, "gateway"))
    both = CA.pem + OTHER.pem
    async with engine_with(server) as engine, pool_for(engine, certificates) as pool:
        await until(lambda: ready(pool))
        engine.behaviour = says("x" * 90, pause=0.05)
        long = asyncio.create_task(run(pool, request()))
        await until(lambda: engine.running)
        engine.behaviour = says("short")
        answered, stop = 0, asyncio.Event()

        async def ask() -> None:
            nonlocal answered
            while not stop.is_set():
                assert await run(pool, request())
                answered += 1
                await asyncio.sleep(0.005)

        asking = [asyncio.create_task(ask()) for _ in range(4)]
        # A new CA is trusted by both first, then signs; then the old one goes.
        for sign, trust in ((CA, both), (OTHER, both), (OTHER, OTHER.pem)):
            (before,) = pool.clients
            sign.issue(engine_files, "engine", ca=trust)
            assert server.refresh()
            sign.issue(gateway_files, "gateway", ca=trust)
            await until(lambda: pool.clients[0] is not before)  # noqa: B023
            seen = answered
            await until(lambda: answered > seen + 10)  # noqa: B023
        assert not long.done(), "it runs over the connection that it began on"
        assert len(await long) == 91
        stop.set()
        await asyncio.gather(*asking)
        assert pool._renewal is not None
        await until(lambda: pool._renewal is not None and not pool._renewal.retired)
        # The next connection is made with what is there now.
        await engine.stop()
        await until(lambda: not ready(pool))
        await engine.start(engine.port)
        await until(lambda: ready(pool))
        assert await run(pool, request())


async def test_a_new_certificate_that_does_not_work_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewal, "FOLLOW_SECONDS", 0.05)
    monkeypatch.setattr(renewal, "_READY_SECONDS", 0.5)
    server = good(tmp_path / "engine")
    certificates = Certificates(CA.issue(tmp_path / "gateway", "gateway"))
    async with engine_with(server) as engine, pool_for(engine, certificates) as pool:
        await until(lambda: ready(pool))
        (before,) = pool.clients
        OTHER.issue(tmp_path / "gateway", "gateway", ca=CA.pem + OTHER.pem)
        await until(lambda: certificates.current.ca != CA.pem)
        await asyncio.sleep(0.8)
        assert pool.clients == (before,)
        assert await run(pool, request())


async def test_a_call_that_runs_through_a_renewal_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls beside the stream, as of training sessions, take minutes: the connection that they began on stays."""
    monkeypatch.setattr(renewal, "FOLLOW_SECONDS", 0.05)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow(engine: FakeEngine, request: object, context: object) -> adapters_pb2.SyncResponse:
        begun.set()
        await go_on.wait()
        return adapters_pb2.SyncResponse(attached="late@1")

    monkeypatch.setattr(FakeEngine, "Sync", slow)
    certificates = Certificates(CA.issue(tmp_path / "gateway", "gateway"))
    async with engine_with(good(tmp_path / "engine")) as engine, pool_for(engine, certificates) as pool:
        await until(lambda: ready(pool))
        calling = asyncio.create_task(AdapterCalls(pool, pool._settings).sync())
        await begun.wait()
        (before,) = pool.clients
        CA.issue(tmp_path / "gateway", "gateway")
        await until(lambda: pool.clients[0] is not before)
        await until(lambda: before._closing)
        assert not calling.done()
        go_on.set()
        assert [answer.attached for answer in await calling] == ["late@1"]
        await until(lambda: pool._renewal is not None and not pool._renewal.retired)


async def test_a_look_at_certificates_that_gets_no_thread_is_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewal, "FOLLOW_SECONDS", 0.05)
    looks, refresh = itertools.count(), Certificates.refresh

    def starved(certificates: Certificates) -> bool:
        if next(looks) < 2:
            raise RuntimeError("can't start new thread")
        return refresh(certificates)

    certificates = Certificates(CA.issue(tmp_path / "gateway", "gateway"))
    async with engine_with(good(tmp_path / "engine")) as engine, pool_for(engine, certificates) as pool:
        await until(lambda: ready(pool))
        monkeypatch.setattr(Certificates, "refresh", starved)
        (before,) = pool.clients
        CA.issue(tmp_path / "gateway", "gateway")
        await until(lambda: pool.clients[0] is not before)
        assert await run(pool, request())


def test_a_gateway_does_not_start_with_an_expired_certificate(tmp_path: Path) -> None:
    files = CA.issue(tmp_path, "gateway", begins=-9 * DAY, ends=-DAY)
    tls = {f"grpc_tls_{field.name}": getattr(files, field.name) for field in dataclasses.fields(files)}
    with pytest.raises(BadSetting, match="has expired") as refused:
        create_app(GatewaySettings.model_validate(tls))
    assert refused.value.param == "grpc_tls_cert"

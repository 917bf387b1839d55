"""`python -m services.gateway`: serves until SIGTERM or Ctrl-C."""

from __future__ import annotations

import errno
import gc
import socket

from pydantic import ValidationError

from services.common.shutdown import end_on_signals
from services.common.telemetry.logging import configure_logging
from services.common.telemetry.recent_logs import RecentLogs
from services.gateway.settings import GatewaySettings


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A socket to listen on.

    Args:
        shared: other gateways of this user may listen there, too. Connections are spread over them.

    Raises:
        SystemExit: the address is taken or not ours; the message is one line for the user.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise SystemExit(
                f"temper gateway: port {port} on {host} is in use: stop what listens there or set TEMPER_PORT"
            ) from error
        raise SystemExit(f"temper gateway: cannot listen on {host}:{port}: {error.strerror or error}") from error
    listener.set_inheritable(True)
    return listener


def main() -> None:
    """Reads the settings from the environment and serves."""
    try:
        settings = GatewaySettings()
    except ValidationError as error:
        first = error.errors()[0]
        # Without a location it is about several, which the message names.
        variable = f"TEMPER_{'_'.join(map(str, first['loc'])).upper()}: " if first["loc"] else ""
        raise SystemExit(f"temper gateway: {variable}{first['msg']}") from error
    recent = configure_logging(settings, service="gateway")
    end_on_signals()
    listeners = [bind(settings.host, settings.port, shared=settings.own_port > 0)]
    if settings.own_port:
        listeners.append(bind("127.0.0.1", settings.own_port))
    serve(settings, listeners, recent)


def serve(settings: GatewaySettings, listeners: list[socket.socket], recent: RecentLogs) -> None:
    """Serves until SIGTERM or Ctrl-C.

    Raises:
        SystemExit: a setting names something that cannot be used; the message is one line for the user.
    """
    # Imported after the checks: it takes seconds, a fifth of them if garbage is looked for among the modules.
    gc.disable()
    import uvicorn

    from services.gateway.server.app import create_app
    from services.gateway.server.http_protocol import HttpProtocol
    from services.gateway.server.named_files import BadSetting
    from services.gateway.server.shutdown import LAST_WORDS_SECONDS, Server, is_draining

    gc.enable()
    try:
        app = create_app(settings, recent=recent)
    except BadSetting as error:
        raise SystemExit(f"temper gateway: TEMPER_{str(error.param).upper()}: {error.message}") from error
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=HttpProtocol.of(settings.write_timeout_seconds, lambda: is_draining(app)),
        ws="none",
        access_log=False,
        log_config=None,
        lifespan="on",
        server_header=False,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=settings.trusted_proxies,
        timeout_graceful_shutdown=settings.shutdown_grace_seconds + LAST_WORDS_SECONDS,
        timeout_keep_alive=30,
    )
    Server(config, app, settings).run(sockets=listeners)


if __name__ == "__main__":
    main()

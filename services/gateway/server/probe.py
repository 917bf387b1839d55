"""`python -m services.gateway.server.probe`: whether the gateway of this container is alive, for images without curl.

GET /livez on TEMPER_HOST and TEMPER_PORT; exit status 0 if the answer is 200, else 1 with one line on stderr.
"""

from __future__ import annotations

import http.client
import sys

from pydantic import ValidationError

from services.gateway.core.addresses import ListenSettings

_SECONDS = 3.0
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
"""An address to listen on is no address to connect to everywhere."""


def main() -> int:
    """Returns the exit status."""
    try:
        settings = ListenSettings()
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        sys.stderr.write(f"temper gateway: TEMPER_{'_'.join(map(str, first['loc'])).upper()}: {first['msg']}\n")
        return 1
    host = _ANY.get(settings.host, settings.host)
    connection = http.client.HTTPConnection(host, settings.port, timeout=_SECONDS)
    try:
        connection.request("GET", "/livez")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        sys.stderr.write(f"temper gateway: no answer on {host}:{settings.port}: {error}\n")
        return 1
    finally:
        connection.close()
    if status != 200:
        sys.stderr.write(f"temper gateway: /livez on {host}:{settings.port} answers {status}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Refusals of browsers by a gateway without API keys: foreign names for this machine, and changes by foreign pages.

Where everybody may do everything, a web page that the user of the machine visits may, too: its scripts send requests to
localhost. A browser says which page a request comes from (Origin, Sec-Fetch-Site), and a name that somebody else has
pointed at this machine is in Host (DNS rebinding). Programs say neither, and are let through.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import Scope

from services.common.errors import ForeignPage

_READS = frozenset({"GET", "HEAD", "OPTIONS"})
_OWN_SITE = frozenset({"same-origin", "none", ""})
_LOCAL_SUFFIXES = (".localhost", ".internal", ".local")
"""Suffixes of names that nobody can register: RFC 6761, ICANN's .internal, and mDNS."""


class BrowserGuard:
    """Tells requests of foreign web pages from those of programs and of the gateway's own pages.

    Args:
        hosts: further names of this machine.
        origins: whose pages may call the gateway.
    """

    def __init__(self, hosts: Collection[str], origins: Collection[str]) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)
        self._origins = frozenset(origins)

    def check(self, scope: Scope, headers: Headers) -> None:
        """Checks one request, before anything else is asked of it.

        Raises:
            ForeignPage: it names this machine as no program here would, or changes something for another site's page.
        """
        host = headers.get("host", "").lower()
        if _arrived_on_loopback(scope) and not self._is_ours(_without_port(host)):
            raise ForeignPage(
                f"this gateway has no API keys and takes requests on loopback only under names of this machine, not "
                f"{host[:100]!r}: call localhost, add the name to TEMPER_ALLOWED_HOSTS, or use API keys "
                "(TEMPER_API_KEYS_FILE)",
                param="host",
            )
        if scope["method"] not in _READS:
            self._check_page(headers, host)

    def _check_page(self, headers: Headers, host: str) -> None:
        origin = headers.get("origin")
        if origin is None:
            foreign = headers.get("sec-fetch-site", "") not in _OWN_SITE
        else:
            foreign = origin not in self._origins and origin.lower().partition("://")[2] != host
        if foreign:
            raise ForeignPage(
                f"this gateway has no API keys, and the page at {(origin or 'another site')[:100]!r} is not its own: "
                "add its origin to TEMPER_CORS_ALLOW_ORIGINS, or use API keys (TEMPER_API_KEYS_FILE)",
                param="origin",
            )

    def _is_ours(self, name: str) -> bool:
        if name in self._hosts or name.endswith(_LOCAL_SUFFIXES):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return "." not in name.rstrip(".")  # "localhost", a container's name: a site's name has a dot
        return address.is_private or address.is_loopback or address.is_unspecified or address.is_link_local


def _arrived_on_loopback(scope: Scope) -> bool:
    """True if the connection's end here is on loopback, which a page can make a browser of this machine dial."""
    address, _ = scope.get("server") or ("", None)
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False  # a Unix socket


def _without_port(host: str) -> str:
    """The name or address in a Host header."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host

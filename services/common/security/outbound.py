"""Connections that leave the cluster: which authorities they trust, and which proxy they take."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]

import certifi
import urllib3

from services.common.settings import CommonSettings


def tls_context(settings: CommonSettings) -> ssl.SSLContext:
    """Trusts the public authorities, and those of TEMPER_CA_BUNDLE beside them."""
    context = ssl.create_default_context()
    if settings.ca_bundle is not None:
        context.load_verify_locations(cafile=settings.ca_bundle)
    return context


def authorities(settings: CommonSettings) -> bytes | None:
    """The same as PEM, for libraries that take no context; None: what they have of their own."""
    if settings.ca_bundle is None:
        return None
    return Path(certifi.where()).read_bytes() + b"\n" + settings.ca_bundle.read_bytes()


def proxy_for(settings: CommonSettings, url: str) -> str | None:
    """The proxy through which a URL is reached; None: directly."""
    parts = urlsplit(url)
    proxy = (settings.https_proxy if parts.scheme == "https" else settings.http_proxy).get_secret_value()
    if not proxy or proxy_bypass_environment(parts.netloc, {"no": settings.no_proxy}):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def pool(settings: CommonSettings, url: str, **options: Any) -> urllib3.PoolManager:
    """Connections to the server of a URL, and to those that it redirects to.

    Args:
        options: of urllib3.PoolManager.
    """
    options["ssl_context"] = tls_context(settings)
    proxy = proxy_for(settings, url)
    if proxy is None:
        return urllib3.PoolManager(**options)
    address = urllib3.util.parse_url(proxy)
    headers = urllib3.make_headers(proxy_basic_auth=address.auth) if address.auth else None
    return urllib3.ProxyManager(
        address._replace(auth=None).url, proxy_headers=headers, proxy_ssl_context=tls_context(settings), **options
    )

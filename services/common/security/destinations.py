"""Addresses that requests on behalf of others may go to: the public ones, unless private ones are allowed.

A name is looked up once, every address that it has is checked, and the connection is made to one that was: a name that
means another address a moment later (DNS rebinding) leads nowhere.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import TypeAlias

_Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class Refused(Exception):
    """An address that nothing is sent to, or a name without one."""


async def checked_address(host: str, port: int, *, private: bool) -> str:
    """An address of a host, all of whose addresses may be called.

    Args:
        private: loopback and private networks may be. Link-local addresses never are: clouds tell secrets there.

    Raises:
        Refused: the name has no address, or one that may not be called.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Refused(f"{host} has no address: {error}") from error
    addresses = [str(entry[4][0]).partition("%")[0] for entry in found]
    for address in addresses:
        if not may_call(address, private=private):
            raise Refused(
                f"{host} is {address}, which is not public: private addresses are called with "
                "TEMPER_WEBHOOK_PRIVATE only, and link-local ones never"
            )
    if not addresses:
        raise Refused(f"{host} has no address")
    return addresses[0]


def may_call(address: str, *, private: bool) -> bool:
    """Whether an address may be called. ``private``: see checked_address."""
    parsed = _inner(ipaddress.ip_address(address))
    if parsed.is_unspecified or parsed.is_multicast or parsed.is_link_local:
        return False
    return private or parsed.is_global


def _inner(address: _Address) -> _Address:
    """IPv4 address that an IPv6 address stands for, wherever a gateway or the kernel would unpack it."""
    if not isinstance(address, ipaddress.IPv6Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address

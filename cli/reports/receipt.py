"""Text of a receipt, and of how two of them differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.markup import escape

_FOLLOWED_FROM = ("base", "data", "seeds", "settings", "code", "libraries", "kernels", "device")
"""Parts of a receipt that a result depends on."""


def receipt(document: Mapping[str, Any]) -> str:
    """A whole receipt (see Receipt.of) in words, as rich markup."""
    content, signature = document["receipt"], document["signature"]
    data, job = content["data"], content["job"]
    origin = data["dataset"]["version"] if data["dataset"] else "data of its own"
    parents = ", ".join(f"{one['version']} ({one['digest'][:12]})" for one in content["parents"]) or "a new adapter"
    device = content["device"]
    lines = [
        f"{content['version']}  {content['digest']}",
        f"  base      {content['base']['name']} ({content['base']['digest'][:12]})",
        f"  from      {parents}",
        f"  data      {origin}, sha256 {data['sha256'][:12]}",
        f"  job       {job['id']}, {job['spec'].get('kind')}, attempt {job['attempt']}",
        "  settings  " + "  ".join(f"{key} {value:.4g}" for key, value in content["settings"].items()),
        "  seeds     " + "  ".join(f"{key} {value}" for key, value in content["seeds"].items()),
        f"  code      temper {content['code']['temper']}, sources {content['code']['sources_sha256'][:12]}",
        "  with      " + ", ".join(f"{key} {value}" for key, value in content["libraries"].items()),
        f"  on        {device['type']} {device['name']}, kernels of {content['kernels']}",
        "  signed    "
        + ("no" if signature is None else f"{signature.get('algorithm')} by {signature.get('public_key')}"),
    ]
    # Whatever it says looks like none of our own words: neither markup nor further lines.
    first, *rest = (escape(line.replace("\n", " ")) for line in lines)
    return "\n".join([f"[bold]{first}[/]", *rest])


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What two runs did not have in common, part by part, of their receipts' contents."""
    found = []
    for part in _FOLLOWED_FROM:
        one, other = before[part], after[part]
        if not isinstance(one, Mapping):
            one, other = {"": one}, {"": other}
        names = sorted(one.keys() | other.keys())
        found += [
            f"{part}{'.' if name else ''}{name}: {one.get(name)} then, {other.get(name)} now"
            for name in names
            if one.get(name) != other.get(name)
        ]
    then, now = ([parent["digest"] for parent in content["parents"]] for content in (before, after))
    return found if then == now else [*found, f"parents: {then} then, {now} now"]

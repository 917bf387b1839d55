"""Formats of JSON schema: the pattern of the texts that are generated for each, or that it is only an annotation.

Stricter than the specifications where they have odd corners: years are of four digits, no 60th second, names of hosts
and numbers are of ordinary length (RFC 3339, RFC 5321, RFC 1123, RFC 3986). So what is generated is valid for every
reader, but not all that is valid is generated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_DATE = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
_ZONE = r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
# Year 0 is none for most readers.
_YEAR_1 = r"(?!0000)"
_LABEL = r"[a-zA-Z0-9]{1,31}(?:-[a-zA-Z0-9]{1,15})?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}\.[a-zA-Z]{{2,15}}"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]{1,20}"
_N = "[0-9]{1,6}"
_DAYS = f"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_HOURS = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_H = "[0-9a-fA-F]{1,4}"
_IPV6 = (
    "(?:"
    + "|".join(
        [f"(?:{_H}:){{7}}{_H}"]
        + [f"{_H}(?::{_H}){{{before - 1}}}::(?:{_H}(?::{_H}){{0,{5 - before}}})?" for before in range(1, 6)]
        + [f"{_H}(?::{_H}){{5}}::{_H}", f"{_H}(?::{_H}){{6}}::", f"::(?:{_H}(?::{_H}){{0,6}})?"]
    )
    + ")"
)
_HEX = "[0-9a-fA-F]"
_PLAIN = r"[A-Za-z0-9\-._~!$&'()*+,;=:@]|%[0-9A-Fa-f]{2}"
_PATH = f"(?:/(?:{_PLAIN})*)*"
_TAIL = rf"(?:\?(?:{_PLAIN}|[/?])*)?(?:#(?:{_PLAIN}|[/?])*)?"
_AUTHORITY = (
    rf"(?:(?:[A-Za-z0-9\-._~]){{1,32}}(?::[A-Za-z0-9]{{0,32}})?@)?(?:{_HOST}|localhost|{_IPV4})(?::[0-9]{{1,4}})?"
)
_URI = rf"(?:(?:https?|ftp|wss?)://{_AUTHORITY}{_PATH}{_TAIL}|(?:urn:[a-z][a-z0-9-]{{1,30}}|mailto|tel|data):(?:{_PLAIN})+)"
_HTTP = rf"https?://{_AUTHORITY}{_PATH}{_TAIL}"
_RELATIVE = rf"(?:{_PATH}{_TAIL}|[A-Za-z0-9\-._~]+{_PATH}{_TAIL})"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_BASE64 = "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/][AQgw]==|[A-Za-z0-9+/]{2}[AEIMQUYcgkosw048]=)?"
_BASE64URL = "(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-][AQgw]==|[A-Za-z0-9_-]{2}[AEIMQUYcgkosw048]=)?"
_IPV4_NETWORK = (
    rf"(?:{_IPV4}/32|{_BYTE}\.{_BYTE}\.{_BYTE}\.0/24|{_BYTE}\.{_BYTE}\.0\.0/16|{_BYTE}\.0\.0\.0/8|0\.0\.0\.0/0)"
)
_IPV6_NETWORK = f"(?:{_IPV6}/128|{_H}(?::{_H}){{3}}::/64|{_H}(?::{_H}){{2}}::/48|::/0)"
_PERSON = r"[A-Za-z]{1,20}(?: [A-Za-z]{1,20}){0,3}"
_NAME_EMAIL = rf"{_PERSON} <[a-zA-Z0-9_+-]{{1,20}}(?:\.[a-zA-Z0-9_+-]{{1,20}}){{0,2}}@{_HOST}>"
_UUID_HEAD = f"{_HEX}{{8}}-{_HEX}{{4}}"
_UUID_TAIL = f"[89abAB]{_HEX}{{3}}-{_HEX}{{12}}"
# A part of ECMA-262's expressions that every dialect has: pieces that are repeated or not, with alternatives.
_REGEX_PIECE = (
    r"(?:[A-Za-z0-9_ ,;:@%&=<>~#!\"'\-]|\.|\\[dwsDWS.*+?()|[\]{}^$/\\]|\[\^?(?:[A-Za-z0-9_ .]|a-z|A-Z|0-9)+\])"
)
_REGEX_RUN = rf"(?:{_REGEX_PIECE}[*+?]?|\((?:{_REGEX_PIECE}[*+?]?)+(?:\|(?:{_REGEX_PIECE}[*+?]?)+)*\)[*+?]?)+"
_REGEX = rf"\^?{_REGEX_RUN}(?:\|{_REGEX_RUN})*\$?"
_INT64 = "(?:-?(?:0|[1-9][0-9]{0,17}))"
_UINT64 = "(?:0|[1-9][0-9]{0,18})"

_TEXTS: Mapping[str, str] = {
    "date": f"{_YEAR_1}{_DATE}",
    "time": f"{_CLOCK}{_ZONE}",
    "date-time": f"{_YEAR_1}{_DATE}T{_CLOCK}{_ZONE}",
    "duration": f"P(?:{_N}W|{_DAYS}(?:{_HOURS})?|{_HOURS})",
    "hostname": _HOST,
    "idn-hostname": _HOST,
    "email": rf"{_ATOM}(?:\.{_ATOM}){{0,2}}@{_HOST}",
    "idn-email": rf"{_ATOM}(?:\.{_ATOM}){{0,2}}@{_HOST}",
    "name-email": _NAME_EMAIL,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "ipv4network": _IPV4_NETWORK,
    "ipv6network": _IPV6_NETWORK,
    "ipvanyaddress": f"(?:{_IPV4}|{_IPV6})",
    "ipvanynetwork": f"(?:{_IPV4_NETWORK}|{_IPV6_NETWORK})",
    "ipv4interface": f"{_IPV4}/(?:3[0-2]|[12]?[0-9])",
    "ipv6interface": f"{_IPV6}/(?:12[0-8]|1[01][0-9]|[1-9]?[0-9])",
    "ipvanyinterface": f"(?:{_IPV4}/(?:3[0-2]|[12]?[0-9])|{_IPV6}/(?:12[0-8]|1[01][0-9]|[1-9]?[0-9]))",
    "cidrv4": f"{_IPV4}/(?:3[0-2]|[12]?[0-9])",
    "cidrv6": f"{_IPV6}/(?:12[0-8]|1[01][0-9]|[1-9]?[0-9])",
    "uuid": f"{_HEX}{{8}}-(?:{_HEX}{{4}}-){{3}}{_HEX}{{12}}",
    **{f"uuid{version}": f"{_UUID_HEAD}-{version}{_HEX}{{3}}-{_UUID_TAIL}" for version in (1, 3, 4, 5, 6, 7, 8)},
    "uri": _URI,
    "url": _URI,
    "iri": _URI,
    "http-url": _HTTP,
    "multi-host-uri": rf"[a-z][a-z0-9]{{1,15}}(?:\+[a-z0-9]{{1,15}})?://{_AUTHORITY}(?:/[A-Za-z0-9_-]*)?",
    "fraction": "-?[0-9]{1,9}(?:/[1-9][0-9]{0,8})?",
    "uri-reference": f"(?:{_URI}|{_RELATIVE})",
    "iri-reference": f"(?:{_URI}|{_RELATIVE})",
    "uri-template": rf"(?:{_URI}|{_PATH}(?:/\{{[A-Za-z][A-Za-z0-9_]{{0,31}}\}})*)",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]{{0,5}})(?:#|{_POINTER})",
    "regex": _REGEX,
    "base64": _BASE64,
    "byte": _BASE64,
    "base64url": _BASE64URL,
    # Its header says {"alg":"HS256"}, with or without a type: not any text is one.
    "jwt": r"eyJhbGciOiJIUzI1NiI(?:sInR5cCI6IkpXVCJ9|n0)\.eyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+",
    "int64": _INT64,
    "uint64": _UINT64,
}  # fmt: skip
ANNOTATIONS = frozenset(
    {
        "unknown",
        "binary",
        "password",
        "path",
        "file-path",
        "directory-path",
        "text",
        "string",
        "html",
        "markdown",
        "char",
    }
)
"""Formats of texts that say what a text is for; every text is valid."""
_WHOLE: Mapping[str, tuple[int, int]] = {
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64, 128)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64, 128)},
    "int": (-(2**63), 2**63 - 1),
    "uint": (0, 2**64 - 1),
}


def pattern_of(shape: str) -> str | None:
    """The pattern of a format's texts; None if it has none."""
    found = _TEXTS.get(shape)
    return None if found is None else f"^(?:{found})$"


def bounds_of(shape: str) -> tuple[int, int] | None:
    """The least and the largest integer of a format of integers; None if it is none."""
    return _WHOLE.get(shape)


def says_nothing(shape: str, schema: Mapping[Any, Any]) -> bool:
    """True if a format that has no pattern is but an annotation of a text: by its name, or for a pattern beside it."""
    members = schema.get("allOf")
    beside = [schema, *(members if isinstance(members, list) else ())]
    described = any(isinstance(each, Mapping) and each.keys() & {"pattern", "enum", "const"} for each in beside)
    return described or shape in ANNOTATIONS or shape in _WHOLE or shape in ("float", "double")


def known() -> list[str]:
    """All formats whose texts are enforced."""
    return sorted(_TEXTS)

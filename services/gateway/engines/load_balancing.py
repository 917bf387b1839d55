"""Load balancing: which engine answers a request.

The session's engine answers, else one that has the adapter or is loading it, else the one with the longest part of the
prompt in its cache, if that is worth going there for, else any, by consistent hashing; and never one that has much more
to do than the others. The choice is pure: everything that is known about engines comes in, an address comes out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from services.common.pb import engine_pb2
from services.gateway.engines.prefix_index import BLOCK_TOKENS, hash_chain

_SLACK = 1.25
"""Most load of an engine as a factor of the mean (consistent hashing with bounded loads, Mirrokni 2016)."""
_MARGIN = 12.0
"""Requests that an engine may have above the least loaded one in any case. With 4, chats found 2 % less of their
prompts in caches (benchmarks.fleet)."""
TOKENS_PER_REQUEST = 256
"""Prompt tokens that are as much work as one running request: on an H200 3 ms of prefill, or a token each for one more
sequence in some hundred steps of decoding."""
_ADAPTER_REQUESTS = 8.0
"""Requests that an engine may have above its share before its adapter is loaded into another one as well."""
_WAITING_REQUESTS = 256.0
"""Requests that an engine may have above its share while its adapter is on its way: those that wait for it compute
nothing, and another engine would ask the store for the same bytes and be served behind this one."""
_MATCH_WORTH = 8.0
"""Requests that a prompt may find before it, more than at the least loaded engine, for each that its match saves. Work
that is saved is saved for all who come later; but whatever many prompts begin with is not worth a queue: all gateways
hear at the same time who has it, and would send theirs there."""
_LEAST_SAVED = 0.75
"""Requests that a match saves at least to be looked at: loads are not known better."""
_KEY_TOKENS = 128

Reason = Literal["session", "adapter", "prefix", "hash"]


@dataclass(frozen=True, slots=True)
class Route:
    """Request as far as routing looks at it."""

    key: bytes
    """Requests with equal keys go to the same engine where nothing else decides."""
    chain: tuple[bytes, ...]
    """Hashes of the prompt's blocks."""
    tokens: int
    """Number of tokens of the prompt."""
    adapter: str
    """Adapter as ``named_adapter`` finds it."""
    composed: bool = False
    """It is for engines that compose adapters only."""


@dataclass(frozen=True, slots=True)
class Affinity:
    """Client's wishes for where its request is sent."""

    session: str | None = None
    """Session, whose requests go to one engine."""
    cache_key: str | None = None
    """Key of requests that probably begin alike."""
    owner: str = ""
    """Owner of the session: others may have one of the same name."""

    @property
    def history(self) -> str | None:
        """Name under which an engine keeps a session together. A cache key is one, too, but not bound to an engine:
        where a product has one key for all of its users, they would all meet in the same place."""
        return self.session or self.cache_key


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that may be given a request."""

    address: str
    load: float
    """Requests there, and prompt tokens that wait, in requests."""
    holds: bool = False
    """The adapter that the request names is in one of its slots."""
    matched: int = 0
    """Blocks of the prompt that it has been given before."""
    expects: bool = False
    """The adapter is on its way into one of the slots."""

    def __post_init__(self) -> None:
        if not 0 <= self.load < float("inf") or self.matched < 0:
            raise ValueError(f"load {self.load} must be finite and matched {self.matched} not negative")


def named_adapter(request: engine_pb2.GenerateRequest) -> str:
    """The adapter that a request names, "name@n" or "name@" for the current version; empty if it names none. Of a
    composition all of them, each with its scale, "a@3*0.7+b@*1.0"."""
    kind = request.adapter.WhichOneof("ref")
    if kind == "composition":
        return "+".join(f"{_ref(one.adapter)}*{one.scale}" for one in request.adapter.composition.members)
    return _ref(request.adapter.named) if kind == "named" else ""


def _ref(named: engine_pb2.NamedAdapter) -> str:
    return f"{named.name}@{named.version or ''}"


def holds(loaded: str, adapter: str) -> bool:
    """True if what an engine has in a slot is the adapter, or the composition, that a request names.

    Args:
        loaded: "name@n" or "a@3*0.7+b@1", as engines tell it.
        adapter: as ``named_adapter`` finds it.
    """
    have, wanted = loaded.split("+"), adapter.split("+")
    return len(have) == len(wanted) and all(_is(one, other) for one, other in zip(have, wanted, strict=True))


def _is(loaded: str, adapter: str) -> bool:
    (version, _, factor), (ref, _, scale) = loaded.partition("*"), adapter.partition("*")
    named = version == ref or (ref.endswith("@") and version.startswith(ref))
    return named and float(factor or 1.0) == float(scale or 1.0)


def route_of(request: engine_pb2.GenerateRequest, tokens: Sequence[int], affinity: Affinity) -> Route:
    """Route of a request: what load balancing has to know of it.

    Args:
        tokens: its prompt; taken from a list rather than from the message, because that takes half as long.
    """
    adapter = named_adapter(request)
    salt = f"{adapter or ('base' if request.adapter.base else '')}\0{request.cache_salt}".encode()
    if adapter:
        key = b"adapter\0" + adapter.encode()
    elif affinity.cache_key is not None:
        key = b"key\0" + affinity.cache_key.encode()
    else:
        key = b"prefix\0" + salt + b"\0" + repr(tokens[:_KEY_TOKENS]).encode()
    return Route(key, hash_chain(tokens, salt), len(tokens), adapter, request.adapter.HasField("composition"))


def session_key(session: str) -> bytes:
    """The key of a session's first request: every gateway sends it to the same engine, loads permitting."""
    return b"session\0" + session.encode()


def _rank(key: bytes, address: str) -> bytes:
    return hashlib.blake2b(key + b"\0" + address.encode(), digest_size=8).digest()


def share(candidates: Sequence[Candidate]) -> float:
    """The load below which an engine may be given one more request: not far above the mean, nor above the least, which
    is far below it in the middle of a wave of requests."""
    mean = (sum(candidate.load for candidate in candidates) + 1.0) / len(candidates)
    least = min(candidate.load for candidate in candidates)
    return min(_SLACK * mean, least + max(_MARGIN, (_SLACK - 1.0) * mean))


def saved(candidate: Candidate) -> float:
    """What an engine's match saves, in requests."""
    return candidate.matched * BLOCK_TOKENS / TOKENS_PER_REQUEST


def allowance(candidate: Candidate, *, named: bool) -> float:
    """Load above its share that an engine may have: as much as sending the request there saves."""
    if named and candidate.holds:
        return saved(candidate) + _ADAPTER_REQUESTS
    if named and candidate.expects:
        return saved(candidate) + _WAITING_REQUESTS
    return saved(candidate)


def attracts(candidate: Candidate, least: float) -> bool:
    """True if the engine is worth choosing for what it has of the prompt.

    Args:
        least: load of the least loaded engine.
    """
    worth = saved(candidate)
    return worth >= _LEAST_SAVED and candidate.load <= least + _MATCH_WORTH * worth


def choose(candidates: Sequence[Candidate], route: Route, *, new_session: str | None = None) -> tuple[str, Reason]:
    """The address of an engine, and what decided.

    Args:
        candidates: at least one.
        new_session: a session without an engine; its later requests go where this one goes.

    Raises:
        ValueError: there is no candidate.
    """
    if not candidates:
        raise ValueError("there is no engine to choose from")
    limit = share(candidates)
    # Never empty: the least loaded is below the mean.
    roomy = [c for c in candidates if c.load < limit + allowance(c, named=bool(route.adapter))]
    reason: Reason = "hash"
    if route.adapter and (holders := [c for c in roomy if c.holds] or [c for c in roomy if c.expects]):
        roomy, reason = holders, "adapter"
    if new_session is not None:
        # Not by the prompt: other gateways have seen other prompts, and the session must not depend on which it meets.
        return _ranked(roomy, session_key(new_session)), "session"
    least = min(candidate.load for candidate in roomy)
    if matching := [candidate for candidate in roomy if attracts(candidate, least)]:
        best = max((candidate.matched, -candidate.load) for candidate in matching)
        roomy = [candidate for candidate in matching if (candidate.matched, -candidate.load) == best]
        reason = reason if reason == "adapter" else "prefix"
    return _ranked(roomy, route.key), reason


def _ranked(candidates: Sequence[Candidate], key: bytes) -> str:
    """Rendezvous hashing: another engine that comes or goes changes nothing unless it is the one chosen."""
    return max(candidates, key=lambda candidate: _rank(key, candidate.address)).address

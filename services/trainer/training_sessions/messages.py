"""Error messages about sessions and futures that do not exist or have ended."""

from __future__ import annotations

from services.common.errors import Gone, InvalidRequest, NotFound, Overloaded


def unknown_session(name: str) -> NotFound:
    return NotFound(f"no such training session: {name[:80]!r}", param="id")


def unknown_future(name: str) -> NotFound:
    return NotFound(f"no such future: {name[:80]!r}", param="id")


def of_another_process(session: str) -> Gone:
    return Gone(
        f"training session {session} was held by an engine process that has ended, and its weights went with it; "
        "open a new one from a checkpoint or an adapter version",
        param="id",
    )


def forgotten(future: str, kept: int, seconds: float) -> Gone:
    return Gone(
        f"call {future} was executed, and its result is not kept any more (the newest {kept} are, for {seconds:g} s)",
        param="id",
    )


def expired(session: str, ttl: float) -> Gone:
    return Gone(
        f"training session {session} expired after {ttl:g} s without a call (ttl_seconds); its weights are gone, "
        "unless they were saved",
        param="id",
    )


def full(count: int, most: int) -> Overloaded:
    return Overloaded(
        f"{count} training sessions are open in this engine, of {most} (TEMPER_SESSIONS_MAX): delete one, or wait "
        "until an idle one expires",
        retry_after=10.0,
    )


def too_long_a_life(ttl: float, most: float) -> InvalidRequest:
    return InvalidRequest(
        f"ttl_seconds is {ttl:g} and may be at most {most:g} (TEMPER_SESSION_TTL_MAX_SECONDS)", param="ttl_seconds"
    )

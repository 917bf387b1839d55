"""Which histories belong to which sessions, and what goes with one."""

from __future__ import annotations

from services.engine.kv_cache.radix_tree import Node
from services.engine.requests.conversation_session import SessionName
from tests.unit.engine.toy_engine import Engine

LONG = tuple(range(1, 20))


def ask(engine: Engine, session: str, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """The prompt and what was answered."""
    name = f"{session}-{len(engine.updates)}"
    engine.add(name, prompt, max_tokens=3, session=SessionName("", session))
    engine.run()
    return (*prompt, *engine.output(name))


def cached(engine: Engine, prompt: tuple[int, ...]) -> int:
    name = f"probe-{len(engine.updates)}"
    engine.add(name, (*prompt, 45), max_tokens=1)
    engine.run()
    return engine.cached(name) or 0


def test_what_others_go_on_from_stays_and_what_nobody_does_goes() -> None:
    engine = Engine()
    common = ask(engine, "a", LONG)
    engine.scheduler.sessions.ended(SessionName("", "b"), _end(engine, "a"), "")
    own = ask(engine, "a", (*common, 40, 41, 42, 43, 44))
    engine.scheduler.sessions.forget(SessionName("", "a"))
    assert cached(engine, own) == len(common) - 1, "its own turn is gone, what it shared is there"
    engine.scheduler.sessions.forget(SessionName("", "b"))
    assert not engine.scheduler.sessions._users
    engine.scheduler.check_integrity()
    alone = Engine()
    common = ask(alone, "a", LONG)
    alone.scheduler.sessions.forget(SessionName("", "a"))
    assert cached(alone, common) < len(LONG) - 1


def test_forgetting_one_looks_at_no_other_one() -> None:
    """There may be thousands, and it is the loop's thread that forgets."""
    engine = Engine(most_sessions=3)
    for number in range(6):
        ask(engine, f"s{number}", tuple(number * 7 % 40 + position % 5 for position in range(1, 20)))
    sessions = engine.scheduler.sessions
    assert len(sessions) == 3
    assert set(sessions._users) == {node for session in sessions.of("") for node in session.path}

    class Untouched(dict[SessionName, object]):
        def values(self) -> object:  # type: ignore[override]
            raise AssertionError("all sessions are gone through")

    sessions._sessions = Untouched(sessions._sessions)  # type: ignore[assignment]
    sessions.forget(SessionName("", "s4"))
    assert len(sessions) == 2


def _end(engine: Engine, session: str) -> Node:
    found = engine.scheduler.sessions.get(SessionName("", session))
    assert found is not None
    return found.path[-1]

"""The supervisor against real, small processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from cli.local.supervisor import Event, Phase, RestartPolicy, Service, ServiceFailed, Supervisor

SLEEPER = "import pathlib,sys,time; pathlib.Path(sys.argv[1]).write_text('up'); time.sleep(60)"


def python(code: str, *args: object) -> list[str]:
    return [sys.executable, "-S", "-c", code, *map(str, args)]


def exists(path: Path) -> Callable[[], str | None]:
    return lambda: None if path.exists() else f"{path.name} is not there"


def sleeper(tmp_path: Path, name: str, **kwargs: object) -> Service:
    flag = tmp_path / f"{name}.flag"
    options: dict[str, object] = {"stop_timeout": 5.0, "start_timeout": 20.0} | kwargs
    return Service(
        name=name,
        argv=python(SLEEPER, flag),
        log=tmp_path / f"{name}.log",
        health=exists(flag),
        **options,  # type: ignore[arg-type]
    )


def supervise(*services: Service) -> tuple[Supervisor, list[Event]]:
    events: list[Event] = []
    return Supervisor(services, base_env=dict(os.environ), report=events.append), events


def order(events: list[Event], phase: Phase) -> list[str]:
    return [event.service for event in events if event.phase is phase]


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the condition did not come true")
        time.sleep(0.01)


def stopped_after(enough: Callable[[list[Event]], bool], *services: Service) -> list[Event]:
    """Runs services until there are enough events."""
    supervisor, events = supervise(*services)

    def stop() -> None:
        wait_until(lambda: enough(events))
        supervisor.request_stop()

    thread = threading.Thread(target=stop, daemon=True)
    supervisor.run(thread.start)
    return events


def test_starts_in_order_says_ready_once_and_stops_by_stage(tmp_path: Path) -> None:
    supervisor, events = supervise(
        sleeper(tmp_path, "front", after=("store",), stop_stage=2),
        sleeper(tmp_path, "engine", after=("store",), stop_stage=1),
        sleeper(tmp_path, "store"),
    )
    ready: list[dict[str, int]] = []

    def on_ready() -> None:
        ready.append(supervisor.pids())
        supervisor.request_stop()

    supervisor.run(on_ready)
    assert len(ready) == 1
    assert set(ready[0]) == {"front", "engine", "store"}
    assert order(events, Phase.STARTING)[0] == "store"
    assert order(events, Phase.STOPPED) == ["front", "engine", "store"]
    assert not any(psutil.pid_exists(pid) for pid in ready[0].values())


def test_restarts_what_dies(tmp_path: Path) -> None:
    service = sleeper(tmp_path, "phoenix", restart=RestartPolicy(first_delay=0.01, longest_delay=0.05))
    supervisor, events = supervise(service)
    first: list[int] = []

    def on_ready() -> None:
        first.append(supervisor.pids()["phoenix"])
        (tmp_path / "phoenix.flag").unlink()
        os.kill(first[0], signal.SIGKILL)
        threading.Thread(target=stop_when_back, daemon=True).start()

    def stop_when_back() -> None:
        while not (tmp_path / "phoenix.flag").exists():
            time.sleep(0.02)
        time.sleep(0.2)
        supervisor.request_stop()

    supervisor.run(on_ready)
    assert order(events, Phase.READY) == ["phoenix", "phoenix"]
    restart = next(event for event in events if event.phase is Phase.RESTARTING)
    assert "killed by signal 9" in restart.detail


def test_gives_up_at_once_on_what_cannot_start_and_stops_the_rest(tmp_path: Path) -> None:
    broken = Service(
        name="broken",
        argv=python("import sys; sys.exit('no such checkpoint')"),
        log=tmp_path / "broken.log",
        health=lambda: "never",
        after=("store",),
    )
    supervisor, events = supervise(sleeper(tmp_path, "store"), broken)
    with pytest.raises(ServiceFailed, match="exited with status 1") as failure:
        supervisor.run(lambda: pytest.fail("never ready"))
    assert "no such checkpoint" in str(failure.value)
    assert order(events, Phase.STOPPED) == ["store"]


CRASHES = (
    # Its first life is long enough to be found ready also on a busy machine.
    "import pathlib,sys,time; flag = pathlib.Path(sys.argv[1]); first = not flag.exists(); flag.touch(); "
    "time.sleep(2 if first else 0.05); print('no luck'); sys.exit(3)"
)


def test_a_loop_of_crashes_is_told_and_ends_nothing(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    flaky = Service(
        name="flaky",
        argv=python(CRASHES, flag),
        log=tmp_path / "flaky.log",
        health=exists(flag),
        restart=RestartPolicy(first_delay=0.01, longest_delay=0.02, alarm_after=3),
    )
    store = sleeper(tmp_path, "store")
    events = stopped_after(lambda events: len(order(events, Phase.RESTARTING)) >= 8, flaky, store)
    crashes = [event for event in events if event.phase is Phase.RESTARTING]
    assert [event.alarming for event in crashes[:8]] == [False, False] + [True] * 6
    assert "(8 times in a row)" in crashes[7].detail
    assert "no luck" in crashes[7].detail
    assert order(events, Phase.STOPPED)[-1] == "store", "the others went on until they were stopped"


def test_who_is_asked_to_stop_has_not_failed(tmp_path: Path) -> None:
    """By somebody else than the supervisor, again and again, soon after it got ready."""
    flag = tmp_path / "flag"
    code = (
        "import pathlib,signal,sys,time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
    )
    policy = RestartPolicy(first_delay=0.01, longest_delay=60.0, alarm_after=2)
    asked = Service("asked", python(code, flag), tmp_path / "asked.log", exists(flag), restart=policy)
    supervisor, events = supervise(asked)

    def ask() -> None:
        for count in range(1, 5):
            wait_until(lambda count=count: len(order(events, Phase.READY)) == count)  # type: ignore[misc]
            flag.unlink()
            os.kill(supervisor.pids()["asked"], signal.SIGTERM)
        wait_until(lambda: len(order(events, Phase.READY)) == 5)
        supervisor.request_stop()

    supervisor.run(lambda: threading.Thread(target=ask, daemon=True).start())
    restarts = [event for event in events if event.phase is Phase.RESTARTING]
    assert [event.detail for event in restarts] == ["asked exited with status 0; starting it again in 0.0 s"] * 4
    assert not any(event.alarming for event in restarts)


def test_what_has_never_worked_is_given_up(tmp_path: Path) -> None:
    broken = Service(
        name="broken",
        argv=python("import sys; sys.exit(3)"),
        log=tmp_path / "broken.log",
        health=lambda: "never",
        restart=RestartPolicy(first_delay=0.01, longest_delay=0.01, start_attempts=3),
    )
    supervisor, events = supervise(broken)
    with pytest.raises(ServiceFailed, match="3 times in a row"):
        supervisor.run(lambda: None)
    assert order(events, Phase.STARTING) == ["broken"] * 3


@pytest.mark.parametrize("crashes", [2, 3])
def test_a_start_that_a_signal_ended_is_tried_again(tmp_path: Path, crashes: int) -> None:
    code = (
        "import os,pathlib,sys,time; tries,flag=map(pathlib.Path,sys.argv[1:3]); tries.open('a').write('.')\n"
        "if len(tries.read_text()) <= int(sys.argv[3]): os.abort()\n"
        "flag.touch(); time.sleep(60)"
    )
    service = Service(
        name="shaky",
        argv=python(code, tmp_path / "tries", tmp_path / "flag", crashes),
        log=tmp_path / "shaky.log",
        health=exists(tmp_path / "flag"),
        restart=RestartPolicy(first_delay=0.01, longest_delay=0.01),
    )
    supervisor, events = supervise(service)
    if crashes < 3:
        supervisor.run(supervisor.request_stop)
        assert order(events, Phase.READY) == ["shaky"]
    else:
        with pytest.raises(ServiceFailed, match=r"killed by signal 6 \(3 times in a row"):
            supervisor.run(lambda: None)
    assert order(events, Phase.STARTING) == ["shaky"] * 3


def test_a_process_waits_for_what_it_needs(tmp_path: Path) -> None:
    """The engine ends without its store, and is killed with it again and again: no failure of its own."""
    store = sleeper(tmp_path, "store", restart=RestartPolicy(first_delay=0.2, longest_delay=0.2))
    code = (
        "import pathlib,sys,time; flag,own=map(pathlib.Path,sys.argv[1:]); own.touch()\n"
        "while flag.exists(): time.sleep(0.25)\n"
        "sys.exit('no store')"
    )
    engine = Service(
        name="engine",
        argv=python(code, tmp_path / "store.flag", tmp_path / "engine.flag"),
        log=tmp_path / "engine.log",
        health=exists(tmp_path / "engine.flag"),
        after=("store",),
        restart=RestartPolicy(first_delay=0.01, longest_delay=0.01, alarm_after=2),
    )
    supervisor, events = supervise(store, engine)

    def kill_the_store() -> None:
        for _ in range(3):
            pid = supervisor.pids()["store"]
            (tmp_path / "store.flag").unlink()
            os.kill(pid, signal.SIGKILL)
            count = len(order(events, Phase.READY))
            wait_until(lambda count=count: len(order(events, Phase.READY)) >= count + 2)  # type: ignore[misc]
        supervisor.request_stop()

    supervisor.run(lambda: threading.Thread(target=kill_the_store, daemon=True).start())
    ends = [event for event in events if event.service == "engine" and event.phase is Phase.RESTARTING]
    assert len(ends) == 3
    assert all("waiting for store" in event.detail and not event.alarming for event in ends)
    names = [event.service for event in events if event.phase is Phase.STARTING]
    assert names == ["store", "engine"] * 4, "it is not started before the store is back"


def test_what_is_never_ready_is_killed_with_the_reason(tmp_path: Path) -> None:
    service = Service(
        name="mute",
        argv=python("import time; time.sleep(60)"),
        log=tmp_path / "mute.log",
        health=lambda: "still loading",
        start_timeout=0.3,
    )
    supervisor, _ = supervise(service)
    with pytest.raises(ServiceFailed, match="not ready after 0 s: still loading"):
        supervisor.run(lambda: None)


def test_what_hangs_is_killed_and_comes_back(tmp_path: Path) -> None:
    """A process that is frozen is there, and answers nobody; one look in between that fails means nothing."""
    looks: list[str | None] = ["late", None, "late", "late", None, "late", "late", "late"]
    frozen = threading.Event()
    service = sleeper(
        tmp_path,
        "frozen",
        alive=lambda: looks.pop(0) if looks and frozen.is_set() else None,
        look_every=0.01,
        patience=3,
        restart=RestartPolicy(first_delay=0.01),
    )
    supervisor, events = supervise(service)
    first: list[int] = []

    def freeze() -> None:
        first.append(supervisor.pids()["frozen"])
        os.kill(first[0], signal.SIGSTOP)
        (tmp_path / "frozen.flag").unlink()
        frozen.set()
        wait_until(lambda: order(events, Phase.READY) == ["frozen"] * 2)
        time.sleep(0.3)  # it stays, once it answers
        supervisor.request_stop()

    supervisor.run(lambda: threading.Thread(target=freeze, daemon=True).start())
    (restart,) = [event for event in events if event.phase is Phase.RESTARTING]
    assert "hangs and was killed: late" in restart.detail
    assert looks == []
    assert not psutil.pid_exists(first[0])


def test_kills_what_ignores_the_stop_signal(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    code = (
        "import pathlib,signal,sys,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
    )
    service = Service(
        name="stubborn",
        argv=python(code, flag),
        log=tmp_path / "stubborn.log",
        health=exists(flag),
        stop_timeout=0.3,
    )
    supervisor, events = supervise(service)
    started = time.monotonic()
    supervisor.run(supervisor.request_stop)
    assert time.monotonic() - started < 10
    assert "killed" in events[-1].detail


def test_a_doubled_signal_still_lets_them_stop_in_order(tmp_path: Path) -> None:
    flag, farewell = tmp_path / "flag", tmp_path / "farewell"
    code = (
        "import pathlib,signal,sys,time\n"
        "def leave(*_):\n"
        "    time.sleep(0.3); pathlib.Path(sys.argv[2]).touch(); sys.exit()\n"
        "signal.signal(signal.SIGTERM, leave); pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
    )
    service = Service(
        name="polite", argv=python(code, flag, farewell), log=tmp_path / "polite.log", health=exists(flag)
    )
    supervisor, events = supervise(service)

    def stop_twice() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    supervisor.run(stop_twice)
    assert farewell.exists()
    assert events[-1].detail == ""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a parent death signal")
def test_children_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    code = f"""
import os, pathlib, sys
sys.path[:0] = {sys.path!r}
from tests.unit.cli.local.test_supervisor import sleeper, supervise
supervisor, _ = supervise(sleeper(pathlib.Path({str(tmp_path)!r}), "child"))
supervisor.run(lambda: print(supervisor.pids()["child"], flush=True))
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    assert child.wait(timeout=10) is None or not child.is_running()


@pytest.mark.parametrize("after", [("nobody",), ("self",)])
def test_refuses_an_order_that_cannot_be(tmp_path: Path, after: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="cannot be ordered"):
        supervise(sleeper(tmp_path, "self", after=after))


def test_backoff_doubles_up_to_its_limit() -> None:
    policy = RestartPolicy(first_delay=0.5, longest_delay=10.0)
    assert [policy.delay(n) for n in (1, 2, 3, 10, 1000)] == [0.5, 1.0, 2.0, 10.0, 10.0]


def test_a_log_is_bounded_while_its_process_runs(tmp_path: Path) -> None:
    writer = "import sys,time\nwhile True:\n  print('x' * 99, flush=True)\n  time.sleep(0.001)"
    log, kept = tmp_path / "writer.log", tmp_path / "writer.1.log"
    service = Service("writer", python(writer), log, lambda: None, log_bytes=20_000)
    supervisor, _ = supervise(service)
    sizes: list[int] = []

    def watch() -> None:
        try:
            wait_until(lambda: kept.exists() and 0 < log.stat().st_size < kept.stat().st_size)
            sizes.append(kept.stat().st_size)
        finally:
            supervisor.request_stop()

    thread = threading.Thread(target=watch)
    supervisor.run(thread.start)
    thread.join()
    assert sizes[0] > 20_000
    assert kept.read_text().startswith("xxx")

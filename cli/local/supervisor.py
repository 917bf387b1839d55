"""Keeps a few processes running: starts them in order, checks their health, restarts what dies, stops all in order.

Generic on purpose: what the processes are is the business of cli/commands/up.py. One loop in the caller's main thread,
because a child asks the kernel to be killed when the *thread* that forked it ends (PR_SET_PDEATHSIG), and because
signal handlers run there.
"""

from __future__ import annotations

import enum
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from cli.local.process import LOG_BYTES, die_with_parent, empty_log, tail

_SAME_REQUEST_SECONDS = 1.0

HealthCheck = Callable[[], str | None]
"""None when the service is ready, or alive, else why it is not. Must return within seconds, for everything else waits
meanwhile, and must not raise."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Policy for starting a process again that died.

    A process that was ready once is started again for ever: what it lacks may come back. One that has never been ready
    is given up. One that was ready and ended by itself with status 0 was asked to, by somebody else: no failure.

    Args:
        first_delay: seconds before the first restart; doubles with each failure in a row.
        longest_delay: the upper end of that.
        stable_after: a process that was ready for this many seconds has a clean record again.
        alarm_after: failures in a row from which on each is told as a loop of crashes, with its last log lines.
        start_attempts: failures before it was ever ready; a process that cannot start has a reason that a retry
            does not cure.
        start_crashes: the same where a signal ended it: a crash is often none that comes again.
    """

    first_delay: float = 0.5
    longest_delay: float = 10.0
    stable_after: float = 10.0
    alarm_after: int = 5
    start_attempts: int = 1
    start_crashes: int = 3

    def __post_init__(self) -> None:
        if not 0 <= self.first_delay <= self.longest_delay:
            raise ValueError("first_delay must be between 0 and longest_delay")
        if min(self.alarm_after, self.start_attempts, self.start_crashes) < 1:
            raise ValueError("alarm_after, start_attempts and start_crashes must be at least 1")

    def delay(self, failures: int) -> float:
        """Seconds to wait after this many failures in a row."""
        return min(self.longest_delay, self.first_delay * 2.0 ** min(failures - 1, 30))


@dataclass(frozen=True, slots=True)
class Service:
    """One process.

    Args:
        name: for people and for the log's file name.
        argv: the command; never a shell.
        log: file that gets stdout and stderr, appended.
        log_bytes: size from which it is emptied; what was in it is kept beside it, once.
        health: asked until it says ready.
        env: variables on top of the caller's own environment.
        cwd: working directory; None: the caller's.
        after: names that must be ready before this one is started, each time.
        stop_stage: services with a higher stage are stopped first; equal ones together.
        start_timeout: seconds to become ready.
        stop_timeout: seconds between SIGTERM and SIGKILL.
        alive: asked now and then once it is ready; a process that hangs is killed, and started again. None: one that
            runs is alive.
        look_every: seconds between two such questions.
        patience: how many in a row must fail.
        cleanup: called after the process is gone (left-over sockets).
    """

    name: str
    argv: Sequence[str]
    log: Path
    health: HealthCheck
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None
    after: tuple[str, ...] = ()
    stop_stage: int = 0
    start_timeout: float = 60.0
    stop_timeout: float = 10.0
    restart: RestartPolicy = RestartPolicy()
    alive: HealthCheck | None = None
    look_every: float = 10.0
    patience: int = 6
    cleanup: Callable[[], None] | None = None
    log_bytes: int = LOG_BYTES

    def __post_init__(self) -> None:
        if not self.argv:
            raise ValueError(f"service {self.name} has an empty command")
        if self.look_every <= 0 or self.patience < 1:
            raise ValueError("look_every must be above 0 and patience at least 1")


class Phase(enum.StrEnum):
    """Phase of a service."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Event:
    """Something for the log of the supervisor. ``seconds`` is the time since that service was started; ``alarming``: it
    dies again and again."""

    service: str
    phase: Phase
    pid: int | None
    seconds: float
    detail: str = ""
    alarming: bool = False


class ServiceFailed(Exception):
    """A service cannot be started. The message has its last log lines."""


class _Runner:
    """The state of one service."""

    def __init__(self, service: Service, base_env: Mapping[str, str]) -> None:
        self.service = service
        self.phase = Phase.WAITING
        self.process: subprocess.Popen[bytes] | None = None
        self.failures = 0
        self.was_ready = False
        self.since = 0.0
        self.retry_at = 0.0
        self.look_at = float("inf")
        self.misses = 0
        self.log_offset = 0
        self._env = {**base_env, **service.env}

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None and self.process.returncode is None else None

    def start(self, now: float) -> None:
        self.service.log.parent.mkdir(parents=True, exist_ok=True)
        with self.service.log.open("ab") as log:
            self.log_offset = log.tell()
            self.process = subprocess.Popen(
                list(self.service.argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                cwd=self.service.cwd,
                # A terminal's Ctrl-C goes to the whole foreground group; only the supervisor may act on it.
                start_new_session=True,
                preexec_fn=die_with_parent(os.getpid()),
            )
        self.phase, self.since = Phase.STARTING, now

    def bound_log(self) -> None:
        """Keeps the log from growing for as long as the process runs."""
        with suppress(OSError):  # a full disk is told by whoever writes
            if empty_log(self.service.log, limit=self.service.log_bytes):
                self.log_offset = 0

    def describe_exit(self) -> str:
        code = self.process.returncode if self.process is not None else None
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"exited with status {code}"
        return f"{self.service.name} {how}"

    def last_words(self) -> str:
        lines = tail(self.service.log, lines=8, offset=self.log_offset)
        return "".join(f"\n  {line}" for line in lines) + f"\n  (all of it: {self.service.log})"


class Supervisor:
    """Runs services until asked to stop, or until one turns out not to start at all.

    Args:
        services: in any order; ``after`` names must exist and not form a circle.
        base_env: environment of every child, below the service's own.
        report: gets every change of phase.
    """

    def __init__(
        self, services: Iterable[Service], *, base_env: Mapping[str, str], report: Callable[[Event], None]
    ) -> None:
        self._runners = {service.name: _Runner(service, base_env) for service in services}
        self._report = report
        self._stop_requested_at: float | None = None
        self._hurry = False
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        _check_order([runner.service for runner in self._runners.values()])

    def pids(self) -> dict[str, int]:
        """Process ids of what runs now."""
        return {name: runner.pid for name, runner in self._runners.items() if runner.pid is not None}

    def request_stop(self) -> None:
        """Makes `run` stop everything and return; a later second call makes it kill instead of asking. Signal-safe.

        Wrappers such as timeout(1) signal both the process and its group: calls within a second of the first are
        the same request.
        """
        now = time.monotonic()
        if self._stop_requested_at is None:
            self._stop_requested_at = now
        elif now - self._stop_requested_at > _SAME_REQUEST_SECONDS:
            self._hurry = True
        self._wake()

    def run(self, on_ready: Callable[[], None]) -> None:
        """Starts everything, calls ``on_ready`` once when all are ready, and returns after an orderly stop.

        Must be called in the main thread: SIGINT, SIGTERM and SIGHUP stop, SIGCHLD wakes the loop.

        Raises:
            ServiceFailed: one that has never been ready does not start; all others have been stopped.
        """
        with ExitStack() as stack:
            stack.callback(self._close)
            stack.enter_context(_Signals(self))
            stack.callback(self._stop_all)
            announced = False
            while self._stop_requested_at is None:
                self._advance(time.monotonic())
                if not announced and all(runner.phase is Phase.READY for runner in self._runners.values()):
                    announced = True
                    on_ready()
                self._sleep(self._pause())

    def _advance(self, now: float) -> None:
        for runner in self._runners.values():
            if self._stop_requested_at is not None:
                return
            runner.bound_log()
            if self._is_due(runner, now):
                self._start(runner, now)
            elif runner.phase in (Phase.STARTING, Phase.READY):
                self._watch(runner, now)

    def _is_due(self, runner: _Runner, now: float) -> bool:
        if runner.phase is Phase.RESTARTING and now < runner.retry_at:
            return False
        return runner.phase in (Phase.WAITING, Phase.RESTARTING) and not self._lacks(runner)

    def _lacks(self, runner: _Runner) -> list[str]:
        """Names of what a service needs and does not have at the moment."""
        return [name for name in runner.service.after if self._runners[name].phase is not Phase.READY]

    def _start(self, runner: _Runner, now: float) -> None:
        try:
            runner.start(now)
        except OSError as error:
            if not runner.was_ready:
                raise ServiceFailed(f"cannot start {runner.service.name}: {error}") from error
            self._died(runner, now, f"{runner.service.name} could not be started: {error}")
            return
        self._emit(runner)

    def _watch(self, runner: _Runner, now: float) -> None:
        process = runner.process
        if process is None or process.poll() is not None:
            crashed = process is not None and process.returncode < 0
            self._died(runner, now, runner.describe_exit(), crashed=crashed)
        elif runner.phase is Phase.STARTING:
            problem = runner.service.health()
            if problem is None:
                self._emit(runner, phase=Phase.READY)
                runner.was_ready, runner.since = True, now
                runner.misses, runner.look_at = 0, now + runner.service.look_every
            elif now - runner.since > runner.service.start_timeout:
                _kill(process)
                limit = f"{runner.service.start_timeout:.0f} s"
                self._died(runner, now, f"{runner.service.name} was not ready after {limit}: {problem}")
        elif runner.service.alive is not None and now >= runner.look_at:
            problem = runner.service.alive()
            runner.misses = 0 if problem is None else runner.misses + 1
            runner.look_at = time.monotonic() + runner.service.look_every
            if runner.misses >= runner.service.patience:
                _kill(process)
                self._died(runner, now, f"{runner.service.name} hangs and was killed: {problem}")

    def _died(self, runner: _Runner, now: float, reason: str, *, crashed: bool = False) -> None:
        service, policy = runner.service, runner.service.restart
        if runner.phase is Phase.READY and now - runner.since >= policy.stable_after:
            runner.failures = 0
        if service.cleanup is not None:
            service.cleanup()
        lacks = self._lacks(runner)
        if lacks:
            # What it needs was there when it was started, and has gone since: that it ended is no failure of its own.
            runner.retry_at = now + policy.first_delay
            self._emit(runner, phase=Phase.RESTARTING, detail=f"{reason}; waiting for {', '.join(lacks)}")
            return
        if runner.phase is Phase.READY and runner.process is not None and runner.process.returncode == 0:
            runner.retry_at = now + policy.first_delay
            again = f"{reason}; starting it again in {policy.first_delay:.1f} s"
            self._emit(runner, phase=Phase.RESTARTING, detail=again)
            return
        runner.failures += 1
        times = "" if runner.failures == 1 else f" ({runner.failures} times in a row)"
        attempts = max(policy.start_attempts, policy.start_crashes) if crashed else policy.start_attempts
        if not runner.was_ready and runner.failures >= attempts:
            raise ServiceFailed(f"{reason}{times}; its last words:{runner.last_words()}")
        delay = policy.delay(runner.failures)
        runner.retry_at = now + delay
        detail, alarming = f"{reason}{times}; starting it again in {delay:.1f} s", runner.failures >= policy.alarm_after
        if alarming:
            detail += f"; its last words:{runner.last_words()}"
        self._emit(runner, phase=Phase.RESTARTING, detail=detail, alarming=alarming)

    def _stop_all(self) -> None:
        stages = sorted({runner.service.stop_stage for runner in self._runners.values()}, reverse=True)
        for stage in stages:
            group = [r for r in self._runners.values() if r.service.stop_stage == stage and r.pid is not None]
            for runner in group:
                _send(runner.process, signal.SIGTERM)
            started = time.monotonic()
            for runner in group:
                self._await_end(runner, started)

    def _await_end(self, runner: _Runner, started: float) -> None:
        process = runner.process
        if process is None:
            return
        detail = ""
        while process.poll() is None:
            if self._hurry or time.monotonic() - started > runner.service.stop_timeout:
                detail = "killed at once, as asked" if self._hurry else "killed: it did not stop in time"
                _kill(process)
                break
            self._sleep(0.05)
        if runner.service.cleanup is not None:
            runner.service.cleanup()
        self._emit(runner, phase=Phase.STOPPED, detail=detail)

    def _emit(self, runner: _Runner, *, phase: Phase | None = None, detail: str = "", alarming: bool = False) -> None:
        runner.phase = phase or runner.phase
        seconds = time.monotonic() - runner.since
        self._report(Event(runner.service.name, runner.phase, runner.pid, seconds, detail, alarming))

    def _pause(self) -> float:
        phases = {runner.phase for runner in self._runners.values()}
        if phases & {Phase.STARTING, Phase.WAITING}:
            return 0.05
        if Phase.RESTARTING in phases:
            return 0.2
        looks = [runner.look_at for runner in self._runners.values() if runner.service.alive is not None]
        return min(5.0, max(0.05, min(looks, default=float("inf")) - time.monotonic()))

    def _sleep(self, seconds: float) -> None:
        """Until the time is over, a child ends, or somebody asks for a stop."""
        readable, _, _ = select.select([self._wake_read], [], [], seconds)
        if readable:
            self._wake_read.recv(4096)

    def _wake(self) -> None:
        try:
            self._wake_write.send(b"\0")
        except BlockingIOError:
            return  # the buffer is full of wake-ups already

    def _close(self) -> None:
        self._wake_read.close()
        self._wake_write.close()


class _Signals(AbstractContextManager[None]):
    """Stop signals ask the supervisor to stop, a child's end wakes it; the old handlers come back afterwards."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._old: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._old[number] = signal.signal(number, self._stop)
        self._old[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, self._child)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self._supervisor.request_stop()

    def _child(self, _number: int, _frame: FrameType | None) -> None:
        self._supervisor._wake()


def _check_order(services: Sequence[Service]) -> None:
    """Raises ValueError if an ``after`` is unknown or the order has a circle."""
    placed: set[str] = set()
    left = list(services)
    while left:
        free = [service for service in left if placed.issuperset(service.after)]
        if not free:
            raise ValueError(f"services cannot be ordered: {', '.join(service.name for service in left)}")
        placed.update(service.name for service in free)
        left = [service for service in left if service.name not in placed]


def _send(process: subprocess.Popen[bytes] | None, number: signal.Signals) -> None:
    if process is not None and process.poll() is None:
        process.send_signal(number)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()

"""The ring of a process's last log lines."""

from __future__ import annotations

import json
import threading

from services.common.telemetry.recent_logs import LogQuery, RecentLogs


def ring(size: int = 5) -> RecentLogs:
    return RecentLogs(size)


def said(logs: RecentLogs, message: str, level: str = "info", **fields: object) -> None:
    logs(None, level, {"event": message, "level": level, "logger": "x", "timestamp": "now", **fields})


def messages(logs: RecentLogs, **query: object) -> list[str]:
    return [line.message for line in logs.find(LogQuery(**query))[0]]  # type: ignore[arg-type]


def test_the_oldest_lines_go() -> None:
    logs = ring(3)
    for number in range(5):
        said(logs, str(number))
    found, last = logs.find(LogQuery())
    assert [line.message for line in found] == ["2", "3", "4"]
    assert [line.number for line in found] == [3, 4, 5]
    assert last == 5
    assert logs.find(LogQuery(), after=4)[0][0].message == "4"


def test_a_ring_of_nothing_keeps_nothing() -> None:
    logs = ring(0)
    said(logs, "1")
    assert logs.find(LogQuery()) == ([], 0)


def test_lines_are_filtered() -> None:
    logs = ring()
    said(logs, "loaded", "debug")
    said(logs, "request", request_id="req-1", completion_id="chatcmpl-1")
    said(logs, "step failed", "error", request="chatcmpl-1:0", exception="Traceback\nValueError: Boom")
    said(logs, "unknown level", "critical", size=7)
    assert messages(logs, level="info") == ["request", "step failed", "unknown level"]
    assert messages(logs, level="error") == ["step failed", "unknown level"]
    assert messages(logs, text="boom") == ["step failed"]
    assert messages(logs, text="size=7") == ["unknown level"]
    assert messages(logs, requests=frozenset(["chatcmpl-1"])) == ["request", "step failed"]
    assert messages(logs, requests=frozenset(["req-1"])) == ["request"]
    assert messages(logs, limit=1) == ["unknown level"]
    assert messages(logs, since=logs.find(LogQuery())[0][-1].time + 1) == []


def test_lines_are_cut_and_are_fit_for_every_protocol() -> None:
    logs = ring()
    many = {f"field{number}": number for number in range(100)}
    said(logs, "é\udce9" * 5000, exception="x" * 10_000 + "the end", odd=float("nan"), thing=object(), **many)
    (line,), _ = logs.find(LogQuery())
    assert len(line.message) == 4096
    assert "\udce9" not in line.message
    assert line.exception.endswith("the end")
    assert len(line.exception) == 8192
    assert len(line.fields) == 24
    assert line.fields["odd"] == "nan"
    assert json.loads(json.dumps(line.fields, allow_nan=False)) == line.fields


def test_threads_get_numbers_of_their_own() -> None:
    logs = ring(1000)
    threads = [threading.Thread(target=lambda: [said(logs, "x") for _ in range(100)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [line.number for line in logs.find(LogQuery(limit=1000))[0]] == list(range(1, 801))

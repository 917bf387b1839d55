"""`temper demo --loop`: visitors rate answers, a learner makes versions of what they say, and bad ones get nowhere."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cli.demo.loop.learner import ROWS, Learner
from cli.demo.loop.report import PROMOTED, Cycle, LoopReport, Trial, markdown, save_plot, table
from cli.demo.loop.traffic import Traffic, Visit, satisfaction
from cli.demo.show import Show
from cli.demo.stack import report_path, running_stack
from cli.http.client import Client
from cli.output import CliError, ExitCode, Output, guarded
from cli.settings import CliSettings, read

_STACK: Mapping[str, str] = {
    "TEMPER_REQUEST_LOG": "true",
    "TEMPER_REQUEST_LOG_PART_SECONDS": "1",
    # Answers, training and evaluation share the cores: threads of one that wait for each other take time from the rest.
    "TEMPER_TORCH_THREADS": "1",
}
_ASKED = 150
"""Visitors whose satisfaction is measured, before and after."""
_MOST_CYCLES = 4
"""Cycles after which it is enough, whatever was promoted."""
_CYCLE_SECONDS = 300.0
_TRIAL_SECONDS = 120.0
_TROLLS = ROWS + ROWS // 3
"""More than a cycle learns from, so that it learns from nobody else."""
_BAD_SHARE = 0.05
_LOGGED_SECONDS = 6.0
"""Time after which a learner counts on the request log having what was answered, and a little more."""
_POLL_SECONDS = 0.3


def run_loop(*, seed: int, output: Path, as_json: bool = False) -> None:
    """Runs it all; ends with status 1 if a goal is missed. With ``as_json`` the report goes to standard output and what
    happens meanwhile to standard error."""
    began = time.monotonic()
    out = Output(as_json=as_json)
    with guarded(out):
        json_file, text_file, plot_file = (
            report_path(output, suffix, name="demo-loop") for suffix in ("json", "md", "png")
        )
        show = Show(out.err if as_json else out.out)
        with contextlib.ExitStack() as stack:
            with show.task("starting Valkey, S3, engine and gateway") as bar:
                url = stack.enter_context(running_stack(bar.say, _STACK))
                bar.end(f"ready on {url}")
            client = stack.enter_context(Client(url, read(CliSettings)))
            findings = session(client, show, seed=seed)
            with show.task("stopping") as bar:
                stack.close()
                bar.end("stopped")
        report = LoopReport(seed=seed, seconds=round(time.monotonic() - began, 1), **findings)
        report.write(json_file)
        save_plot(report, plot_file)
        text_file.write_text(markdown(report, plot_file), encoding="utf-8")
        show.console.print()
        show.console.print(table(report))
        show.console.print(
            f"\nsatisfaction {report.before:+.2f} → [bold green]{report.after:+.2f}[/] in {report.seconds:.0f} s; "
            f"written: {json_file}, {text_file}, {plot_file}",
            soft_wrap=True,
        )
        if as_json:
            out.json(report.document())
        if missed := report.missed():
            raise CliError("; ".join(missed))


def session(client: Client, show: Show, *, seed: int) -> dict[str, Any]:
    """Everything between start and stop; the report's fields."""
    model = str(client.get("/v1/models")["data"][0]["id"])
    traffic = Traffic(client, model, seed)
    with traffic.flowing():
        show.heading("1. Visitors chat with the model, and rate each answer from -1 to 1")
        before = _asked(traffic, show, "base")
        show.heading("2. A learner makes versions of what they say; the gate and a canary decide on each")
        learner = Learner.applied(client, seed)
        cycles = _learn(traffic, show, learner)
        show.heading("3. Trolls come, who rate right and wrong the other way round")
        poisoned = _poison(traffic, show, learner, len(cycles) + 1)
        show.heading(
            "4. Somebody trains longer on their data, without the gate, and tries the version on a few visitors"
        )
        trial = _try_bad(traffic, show, learner)
        show.heading("5. The visitors, once more")
        after = _asked(traffic, show, _answering(traffic.visits))
    return {
        "before": before,
        "after": after,
        "cycles": cycles,
        "poisoned": poisoned,
        "trial": trial,
        "visits": list(traffic.visits),
    }


def _asked(traffic: Traffic, show: Show, version: str) -> float:
    with show.task(f"{_ASKED} visitors", total=_ASKED) as bar, traffic.hurrying():
        mean = satisfaction(traffic.wait(_ASKED, lambda visit: visit.version == version and not visit.troll))
        bar.end(f"satisfaction {mean:+.2f} with {version}")
    return mean


def _learn(traffic: Traffic, show: Show, learner: Learner) -> list[Cycle]:
    """Has the learner do cycles until enough of its versions are promoted."""
    cycles: list[Cycle] = []
    while len(cycles) < _MOST_CYCLES and sum(cycle.ended.outcome == "promoted" for cycle in cycles) < PROMOTED:
        learner.allow(len(cycles) + 1)
        cycles.append(_cycle(traffic, show, learner, len(cycles) + 1))
    return cycles


def _cycle(traffic: Traffic, show: Show, learner: Learner, number: int) -> Cycle:
    """Follows the learner until its cycle of this number has ended."""
    began, tried = traffic.now, None
    with show.task(f"cycle {number}") as bar, contextlib.ExitStack() as hurry:
        while True:
            traffic.check()
            found = learner.now()
            if found["cycle"] > number or (found["cycle"] == number and found["state"] in ("collecting", "stopped")):
                break
            if traffic.now - began > _CYCLE_SECONDS:
                raise CliError(f"cycle {number} has not ended in {_CYCLE_SECONDS:.0f} s", ExitCode.TIMED_OUT)
            bar.say(str(found["state"]))
            if found["state"] == "canary" and tried is None:
                tried = traffic.now
                hurry.enter_context(traffic.hurrying())
            time.sleep(_POLL_SECONDS)
        last = learner.ended()[number - 1]
        effect = "" if last.effect is None else f": {last.effect:+.2f} by {last.visitors} visitors"
        bar.end(f"{last.candidate or 'candidate'} {last.outcome.replace('_', ' ')}{effect}")
    return Cycle(last, began, tried, traffic.now)


def _poison(traffic: Traffic, show: Show, learner: Learner, number: int) -> Cycle:
    """Lets trolls come, and the learner do one cycle more."""
    with traffic.trolling():
        with show.task(f"{_TROLLS} trolls", total=_TROLLS) as bar, traffic.hurrying():
            traffic.wait(_TROLLS, lambda visit: visit.troll)
            time.sleep(_LOGGED_SECONDS)
            bar.end("each of them insists on dates that are a day late")
        learner.allow(number)
        while learner.now()["cycle"] < number:
            traffic.check()
            time.sleep(_POLL_SECONDS)
    cycle = _cycle(traffic, show, learner, number)
    show.say(cycle.ended.why)
    return cycle


def _try_bad(traffic: Traffic, show: Show, learner: Learner) -> Trial:
    """Makes a version of what the trolls said, and tries it."""
    with show.task("job without a gate") as bar:
        version = learner.candidate(str(learner.now()["dataset"]))
        bar.end(f"published {version}")
    began, first = traffic.now, len(traffic.visits)
    with show.task(f"canary of {version}, {_BAD_SHARE:.0%} of the visitors") as bar, traffic.hurrying():
        canary = learner.try_out(version, _BAD_SHARE)
        while (found := learner.canary(canary))["ended_at"] is None and traffic.now - began < _TRIAL_SECONDS:
            traffic.check()
            time.sleep(_POLL_SECONDS)
        until, seen = traffic.now, traffic.visits[first:]
        trial = Trial(
            version=version,
            outcome=str(found["state"]),
            reason=str((found["decision"] or {}).get("detail", "")),
            began=began,
            until=until,
            visits=len(seen),
            exposed=sum(visit.version == version for visit in seen),
        )
        bar.end(f"{trial.outcome.replace('_', ' ')}; it answered {trial.exposed} of {trial.visits} visitors")
    show.say(trial.reason)
    return trial


def _answering(visits: Sequence[Visit]) -> str:
    """The version that answered most of the last visitors."""
    return Counter(visit.version for visit in visits[-_ASKED // 4 :]).most_common(1)[0][0]

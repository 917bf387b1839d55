"""Judgement of a learning loop after its processes were killed, by what its API, its events and its store tell."""

from __future__ import annotations

import asyncio
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from pydantic_core import from_json

from benchmarks.gateway.loop_kills.fleet import Client
from benchmarks.gateway.loop_kills.loop import NAME, OUTCOMES, events
from benchmarks.gateway.loop_kills.users import Opinion, Users
from services.common.adapters.keys import canary_key
from services.common.adapters.names import parse_adapter_version
from services.common.errors import TemperError
from services.common.settings import CommonSettings
from services.common.storage.object_store import ObjectStore

_ENDS = "promoted|rolled_back|superseded"
_CYCLE = re.compile(
    rf"preparing( data( training( evaluating)?( rejected| canary canary ({_ENDS})| canary( canary)? failed)?)?)?"
    r"( failed)?"
)
_BY_PEOPLE = frozenset(("collecting", "stopped", "resumed", "changed", "paused"))
_Event = Mapping[str, Any]


@dataclass(slots=True)
class Cycle:
    """One cycle, as its events tell it."""

    number: int
    events: list[_Event] = field(default_factory=list)

    @property
    def path(self) -> str:
        return " ".join(event["kind"] for event in self.events)

    def evidence(self, kind: str) -> Mapping[str, Any]:
        """Of the first event of a kind; empty: there was none."""
        return next((event["evidence"] for event in self.events if event["kind"] == kind), {})

    @property
    def outcome(self) -> str | None:
        """None: it has not ended."""
        return next((event["kind"] for event in self.events if event["kind"] in OUTCOMES), None)

    @property
    def counts(self) -> bool:
        """True if what its data set has is not taught as new again."""
        return self.outcome not in (None, "failed")


def cycles_of(told: Sequence[_Event]) -> list[Cycle]:
    """Cycles by number."""
    found: dict[int, Cycle] = {}
    for event in told:
        if event["kind"] not in _BY_PEOPLE:
            found.setdefault(event["cycle"], Cycle(event["cycle"])).events.append(event)
    return [found[number] for number in sorted(found)]


def paths(cycles: Sequence[Cycle]) -> Iterator[str]:
    """What is wrong with the order of events."""
    if [cycle.number for cycle in cycles] != list(range(1, len(cycles) + 1)):
        yield f"cycles are numbered {[cycle.number for cycle in cycles]}"
    for cycle in cycles:
        if not _CYCLE.fullmatch(cycle.path):
            yield f"cycle {cycle.number} went {cycle.path}"
        if cycle is not cycles[-1] and cycle.outcome is None:
            yield f"cycle {cycle.number} has no end: {cycle.path}"


def promotions(cycles: Sequence[Cycle]) -> Iterator[str]:
    """What is wrong with the evidence of promoted versions."""
    counts = Counter(cycle.evidence("promoted")["candidate"] for cycle in cycles if cycle.outcome == "promoted")
    yield from (f"{version} was promoted {count} times" for version, count in counts.items() if count > 1)
    for cycle in cycles:
        if cycle.outcome == "promoted":
            decided, gate = cycle.evidence("promoted"), cycle.evidence("canary")
            if (decided.get("decision") or {}).get("outcome") != "promote" or not decided.get("look"):
                yield f"{decided['candidate']} was promoted without a canary's decision: {decided}"
            conditions = [one for gates in gate.get("gates", ()) for one in gates["conditions"]]
            if not conditions or not all(one["passed"] for one in conditions):
                yield f"{decided['candidate']} was promoted without having passed a gate: {gate}"


def answers(answered: set[tuple[str, str]], cycles: Sequence[Cycle], versions: set[str]) -> Iterator[str]:
    """What is wrong with the versions that users were answered with."""
    promoted = {cycle.evidence("promoted")["candidate"] for cycle in cycles if cycle.outcome == "promoted"}
    tried = {one.get("candidate") for cycle in cycles if "canary" in (one := cycle.events[-1]["evidence"])}
    tried |= {event["evidence"].get("candidate") for cycle in cycles for event in cycle.events}
    for version, arm in sorted(answered):
        if version and version not in versions:
            yield f"{version} has answered, and does not exist"
        elif version and version not in (tried if arm == "candidate" else promoted):
            yield f"{version} has answered {arm or 'outside of a canary'}, and never was to"


def opinions(sent: Sequence[Opinion], kept: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What is wrong with the feedback that is kept."""
    ids = Counter(one["id"] for one in kept)
    said = Counter((one["completion_id"], one["user"]) for one in kept)
    by_id = {one["id"]: one for one in kept}
    yield from (f"feedback {one} is there {count} times" for one, count in ids.items() if count > 1)
    yield from (
        f"the opinion of {user} on {of} is there {count} times" for (of, user), count in said.items() if count > 1
    )
    for one in sent:
        found = by_id.get(one.id)
        if found is None:
            yield f"feedback {one.id} was acknowledged, and is lost"
        elif {name: found[name] for name in one.body} != one.body:
            yield f"feedback {one.id} says {found}, it was {one.body}"
    if strange := by_id.keys() - {one.id for one in sent}:
        yield f"feedback that nobody knows of: {sorted(strange)[:5]} of {len(strange)}"


@dataclass(slots=True)
class Audit:
    """All that is looked at once nothing is killed any more."""

    client: Client
    settings: CommonSettings
    users: Users
    breaches: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    async def run(self) -> None:
        """Looks at everything."""
        cycles = cycles_of(await events(self.client))
        kept = [from_json(line) for line in (await self.client.sure("GET", "/v1/feedback/export")).text.splitlines()]
        listed = (await self.client.get(f"/v1/adapters/{NAME}/versions"))["data"]
        versions = {f"{NAME}@{one['version']}" for one in listed}
        self.breaches += self.users.breaches
        self.breaches += opinions(self.users.opinions, kept)
        self.breaches += paths(cycles)
        self.breaches += promotions(cycles)
        self.breaches += answers(self.users.answered, cycles, versions)
        await self._records(cycles)
        await self._jobs(cycles)
        await self._pointers(cycles, [f"{NAME}@{one['version']}" for one in listed if one["current"]])
        await self._data(cycles, kept)
        self.facts |= {
            "feedback": len(kept),
            "answers": dict(sorted(self.users.answers.items())),
            "cycles": dict(Counter(cycle.outcome or "unfinished" for cycle in cycles)),
            "failed_because": dict(Counter(_why(cycle) for cycle in cycles if cycle.outcome == "failed")),
            "versions": len(versions),
        }

    async def _records(self, cycles: Sequence[Cycle]) -> None:
        """Each promoted version has the canary's record with its evidence, here and beside it in the object store."""
        records = {one["id"]: one for one in await self.client.all("/v1/canaries", limit="1000")}
        store = ObjectStore(self.settings)
        ended = {cycle.evidence("promoted").get("canary") for cycle in cycles}
        for record in records.values():
            if record["state"] != "promoted":
                continue
            if record["id"] not in ended:
                self.breaches.append(f"{record['id']} has promoted {record['candidate']}, and no cycle tells of it")
            if not record["evidence"] or not record["decision"]:
                self.breaches.append(f"{record['id']} has promoted without evidence")
            try:
                key = canary_key(parse_adapter_version(record["candidate"]), record["id"])
                beside = from_json((await asyncio.to_thread(store.get, key)).data)
            except TemperError as error:
                self.breaches.append(f"{record['candidate']} has no record of {record['id']}: {error.message}")
                continue
            if beside["decision"] != record["decision"] or not beside["evidence"]:
                self.breaches.append(f"the record beside {record['candidate']} tells otherwise: {beside}")
        for cycle in cycles:
            if (
                cycle.outcome == "promoted"
                and records.get(cycle.evidence("promoted")["canary"], {}).get("state") != "promoted"
            ):
                self.breaches.append(f"cycle {cycle.number} tells of a promotion that no canary has made")

    async def _jobs(self, cycles: Sequence[Cycle]) -> None:
        """A cycle has one job, and that at most one version."""
        jobs = [one for one in await self.client.all("/v1/train/jobs", limit="1000") if one["adapter"] == NAME]
        of = Counter(int(one["metadata"]["cycle"]) for one in jobs)
        self.breaches += [f"cycle {number} has {count} jobs" for number, count in of.items() if count > 1]
        versions = Counter(one["result_adapter"] for one in jobs if one["result_adapter"])
        self.breaches += [f"{version} is of {count} jobs" for version, count in versions.items() if count > 1]
        self.facts["jobs"] = dict(Counter(one["state"] for one in jobs))
        self.facts["attempts"] = sum(one["attempts"] for one in jobs)

    async def _pointers(self, cycles: Sequence[Cycle], current: Sequence[str]) -> None:
        """What is current and attached is what was promoted last."""
        last = [cycle.evidence("promoted")["candidate"] for cycle in cycles if cycle.outcome == "promoted"][-1:]
        attached = (await self.client.get("/v1/adapters"))["attached"]
        if current != last or [attached] != (last or [None]):
            self.breaches.append(f"{current} is current, {attached} attached, and {last} was promoted last")
        self.facts["promoted"] = sum(cycle.outcome == "promoted" for cycle in cycles)

    async def _data(self, cycles: Sequence[Cycle], kept: Sequence[Mapping[str, Any]]) -> None:
        """Every opinion is in the data of one cycle that was not to be repeated, and in it once."""
        taught: dict[str, list[str]] = defaultdict(list)
        until = 0.0
        for cycle in cycles:
            made, window = cycle.evidence("data"), cycle.evidence("preparing")
            if window and window["since"] != until:
                self.breaches.append(
                    f"cycle {cycle.number} begins at {window['since']}, what was taught ends at {until}"
                )
            if not cycle.counts:
                continue
            since, until = until, window["until"]
            expected = sum(since <= one["changed_at"] < until for one in kept)
            if made["report"]["opinions"] != expected:
                self.breaches.append(
                    f"{made['dataset']} has looked at {made['report']['opinions']} of {expected} opinions"
                )
            for answer in await self._rows(made):
                taught[answer].append(made["dataset"])
        self.breaches += [f"{answer} is taught by {refs}" for answer, refs in taught.items() if len(refs) > 1]
        of_cycles = {cycle.evidence("data")["dataset"] for cycle in cycles if cycle.counts}
        left_out = []
        for one in kept:
            refs = [ref for ref in one["used_by"] if ref in of_cycles]
            if refs != taught.get(one["completion_id"], []):
                self.breaches.append(f"{one['id']} is said to be in {refs}, it is in {taught[one['completion_id']]}")
            if not refs and one["changed_at"] < until:
                left_out.append(one["completion_id"])
        logged = [answer for answer in left_out if await self._is_logged(answer)]
        if logged:
            self.breaches.append(f"{len(logged)} opinions of logged answers were never taught: {logged[:5]}")
        self.facts |= {"taught": len(taught), "answers_not_logged": len(left_out) - len(logged)}

    async def _rows(self, made: Mapping[str, Any]) -> list[str]:
        ref, found, after = made["dataset"], [], -1
        now = await self.client.get(f"/v1/datasets/{ref}")
        if now["digest"] != made["digest"]:
            self.breaches.append(f"{ref} is another one than its cycle has made")
        while True:
            page = await self.client.get(f"/v1/datasets/{ref}/rows", limit="1000", after=str(after))
            for row in page["data"]:
                found.append(row["answer_id"])
                if row["opinions"] != 1:
                    self.breaches.append(f"{row['answer_id']} has {row['opinions']} opinions in {ref}")
            if not page["has_more"]:
                return found
            after += len(page["data"])

    async def _is_logged(self, answer: str) -> bool:
        response = await self.client.sure("GET", f"/v1/request_log/{answer}")
        return response.status_code == httpx.codes.OK


def _why(cycle: Cycle) -> str:
    return str(cycle.events[-1]["detail"]).partition("failed ")[2][:160]

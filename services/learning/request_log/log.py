"""The request log as its readers see it: a request by an id of its answer, lists, and erasure that leaves nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.common.errors import NotFound
from services.common.storage.ids import key_of
from services.learning.request_log.index import Entry, RequestIndex, answer_mark, user_mark
from services.learning.request_log.parts import Line, Parts, lines_of, part_began
from services.learning.request_log.record import LoggedRequest

_PAGE = 200


@dataclass(frozen=True, slots=True)
class RequestFilter:
    """Choice of logged requests. ``owner`` None: of everybody."""

    owner: str | None
    user: str | None = None
    session: str | None = None
    since: float = 0.0
    until: float = float("inf")
    """Unix seconds between which they ended."""

    @property
    def list(self) -> str:
        """The shortest list that has all of them."""
        for kind, name in (("session", self.session), ("user", self.user), ("owner", self.owner)):
            if name is not None:
                return f"{kind}:{key_of(name)}"
        return "all"

    def takes(self, record: LoggedRequest) -> bool:
        """True if the request is among them."""
        return (
            self.owner in (None, record.owner)
            and self.user in (None, record.user)
            and self.session in (None, record.session)
            and self.since <= record.at < self.until
        )


class RequestLog:
    """Reads and erases logged requests. Thread-safe and blocking; Unavailable when a store is away."""

    def __init__(self, parts: Parts, index: RequestIndex) -> None:
        self._parts = parts
        self._index = index

    def known_until(self, now: float) -> float:
        """Unix seconds up to which every request that is logged can be found, but for what gateways are just about to
        write: the beginning of the first part that waits in a spool."""
        return min((part_began(part) for part in self._index.waiting(now)), default=now)

    def get(self, answer_id: str) -> LoggedRequest:
        """The request whose answer has this id, or whose choice or response has it. Raises NotFound."""
        found = self.find([answer_id])
        if not found:
            raise NotFound(
                f"no logged request has the answer {answer_id[:80]!r}: it was not logged, or is not kept any more",
                param="id",
            )
        return found[0][1]

    def find(self, answer_ids: Sequence[str]) -> list[tuple[str, LoggedRequest]]:
        """The requests that are kept among those with these answers, by the ids asked for."""
        places = self._index.find(answer_ids)
        texts = self._parts.read(list(dict.fromkeys(places.values())))
        return [(one, LoggedRequest.parse(texts[line], str(line))) for one, line in places.items() if line in texts]

    def newest(self, wanted: RequestFilter, *, limit: int, after: str | None = None) -> list[LoggedRequest]:
        """Requests, newest first, from behind ``after`` on."""
        found: list[LoggedRequest] = []
        while len(found) < limit:
            ids = self._index.newest(wanted.list, limit=_PAGE, after=after)
            if not ids:
                break
            after = ids[-1]
            page = [record for _, record in self.find(ids)]
            found += filter(wanted.takes, page)
            if page and page[-1].at < wanted.since:
                break
        return found[:limit]

    def count(self, owner: str | None, since: float, until: float) -> int:
        """Number of requests of an API key (None: of all) that ended between two times, by the index alone."""
        return self._index.count(RequestFilter(owner).list, since, until)

    def between(self, wanted: RequestFilter) -> Iterator[tuple[Line, LoggedRequest]]:
        """All of them with their places, by the parts alone, about in the order in which they ended."""
        for part in self._parts.between(wanted.since, min(wanted.until, time.time())):
            for line, data in lines_of(part, self._parts.whole(part) or b""):
                record = LoggedRequest.parse(data, str(line))
                if wanted.takes(record):
                    yield line, record

    def erase(self, answer_id: str, wanted: RequestFilter) -> bool:
        """Removes the request with this answer, also where it is still to be written; False: there is none among
        those that the filter takes."""
        found = [record for _, record in self.find([answer_id]) if wanted.takes(record)]
        if not found:
            return False
        self._index.mark_erased([answer_mark(found[0].id)], time.time())
        self._take_out(found)
        return True

    def erase_user(self, user: str, owner: str | None) -> int:
        """Removes all requests of a user, also those that are still to be written; returns how many were found.

        Args:
            owner: only those that this API key sent; None: all.
        """
        # The mark first: a gateway that writes a part looks for marks once its requests can be found here.
        self._index.mark_erased([user_mark(user, owner)], time.time())
        gone = 0
        while found := self.newest(RequestFilter(owner, user), limit=_PAGE):
            self._take_out(found)
            gone += len(found)
        return gone

    def erased_since(self, moment: float) -> list[str]:
        """Marks of what was erased since a moment (unix seconds)."""
        return [mark for mark, at in self._index.erased().items() if at >= moment]

    def reindex(self, now: float) -> int:
        """Makes the index again from the parts, where Redis has lost it; returns how many requests there are."""
        count, part, entries = 0, "", list[tuple[Entry, Line]]()
        for line, record in self.between(RequestFilter(None)):
            if line.part != part:
                self._index.add(part, entries, now)
                part, entries = line.part, []
            entries.append((entry_of(record), line))
            count += 1
        self._index.add(part, entries, now)
        self._index.mark_whole()
        return count

    def _take_out(self, records: Sequence[LoggedRequest]) -> None:
        places = self._index.find([record.id for record in records])
        self._parts.take_out(list(places.values()))
        self._index.remove([entry_of(record) for record in records])


def entry_of(record: LoggedRequest) -> Entry:
    """What the index says of a request."""
    return Entry(record.id, record.at, record.owner, record.user, record.session, record.also)

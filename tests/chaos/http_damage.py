"""Damage of objects on their way: bytes of bodies change between an object store and who reads them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

_END = b"\r\n\r\n"


class Messages:
    """One direction of an HTTP/1.1 connection: heads, and bodies whose length their heads say."""

    def __init__(self) -> None:
        self._head = b""
        self._left = 0
        self._lost = False
        """It cannot be followed any further: a body of a length that nobody said."""

    def read(self, data: bytes) -> Iterator[tuple[bytes, int]]:
        """Each head that ends in the data, with where in the data its body begins. Who reads them says with `no_body`
        that there is none, whatever the head says."""
        at = 0
        while at < len(data) and not self._lost:
            if self._left:
                skipped = min(self._left, len(data) - at)
                self._left -= skipped
                at += skipped
                continue
            before = len(self._head)
            self._head += data[at:]
            end = self._head.find(_END)
            if end < 0:
                return
            head, self._head = self._head[:end], b""
            at += end + len(_END) - before
            self._left = _length(head)
            self._lost = b"transfer-encoding" in head.lower()
            yield head, at

    def no_body(self) -> None:
        """What was read last is a head alone."""
        self._left = 0
        self._lost = False


class Damage:
    """Follows one connection, so that it is known which bytes from the server are objects. Listings and errors are left
    alone: they are in no object, and have no digest."""

    def __init__(self) -> None:
        self._methods: deque[bytes] = deque()
        """Of requests that have no answer yet."""
        self._asked, self._answered = Messages(), Messages()

    def request(self, data: bytes) -> None:
        """Reads what goes to the server."""
        for head, _ in self._asked.read(data):
            self._methods.append(head.split(b" ", 1)[0])

    def answer(self, data: bytes) -> list[int]:
        """Reads what comes from the server; returns where in it objects begin."""
        found = []
        for head, at in self._answered.read(data):
            status = head.split(b" ", 2)[1]
            if status.startswith(b"1"):
                self._answered.no_body()
                continue
            method = self._methods.popleft() if self._methods else b""
            if method == b"HEAD" or status in (b"204", b"304"):
                self._answered.no_body()
                continue
            whole = method == b"GET" and status in (b"200", b"206") and b"application/xml" not in head.lower()
            if whole and _length(head) and at < len(data):
                found.append(at)
        return found


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    return 0

"""Conversation sessions: where each session's cached conversation ends in the radix tree, and until when it is pinned.

A session points to the node at which its last request ended. For a while after each request that node is pinned, on the
device and in the tiers.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from services.engine.kv_cache.keys import Key
from services.engine.kv_cache.prefix_cache import PrefixCache
from services.engine.kv_cache.radix_tree import Node
from services.engine.kv_offload.connector import OffloadConnector
from services.engine.kv_offload.messages import Forget, Pin
from services.engine.requests.conversation_session import SessionName


@dataclass(slots=True)
class ConversationSession:
    """Conversation session of a client."""

    name: SessionName
    path: tuple[Node, ...]
    """Nodes of its longest conversation, from below the root."""
    adapter: str
    created: float
    """Time of its first request, on the scheduler's clock, as all times here."""
    used: float
    expires: float
    requests: int = 0

    def tip(self) -> Node | None:
        """Last node of the conversation that is still cached; None: there is none."""
        return next((node for node in reversed(self.path) if node.parent is not None and (node.slot or node.key)), None)


class ConversationSessions:
    """All conversation sessions, last used last. Used by the loop thread.

    Args:
        offload: offload connector; None: there are no tiers.
        seconds: time that a conversation stays pinned after each request.
        most: most sessions that are remembered; the least recently used one is forgotten.
        clock: seconds, on the clock of the cache's pins.
    """

    def __init__(
        self,
        cache: PrefixCache,
        offload: OffloadConnector | None,
        *,
        seconds: float,
        most: int,
        clock: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._offload = offload
        self._seconds = seconds
        self._most = most
        self._clock = clock
        self._sessions: OrderedDict[SessionName, ConversationSession] = OrderedDict()
        self._tips: dict[Node, SessionName] = {}
        """Session of each pinned node."""
        self._users: Counter[Node] = Counter()
        """Number of sessions whose conversation has each node."""

    def __len__(self) -> int:
        return len(self._sessions)

    def of(self, owner: str) -> Iterator[ConversationSession]:
        """Sessions of an owner, last used first."""
        return (session for session in reversed(self._sessions.values()) if session.name.owner == owner)

    def get(self, name: SessionName) -> ConversationSession | None:
        return self._sessions.get(name)

    def ended(self, name: SessionName, node: Node, adapter: str) -> None:
        """Records that a request of a session has ended at a node."""
        now = self._clock()
        session = self._sessions.get(name)
        if session is None:
            session = self._sessions[name] = ConversationSession(name, (), adapter, now, now, now)
        self._unpin(session)
        self._follow(session, tuple(node.path()))
        session.adapter, session.used = adapter, now
        session.expires = now + self._seconds
        session.requests += 1
        self._sessions.move_to_end(name)
        self._tips[node] = name
        self._pin(session)
        while len(self._sessions) > self._most:
            oldest = self._sessions.popitem(last=False)[1]
            self._unpin(oldest)
            self._follow(oldest, ())

    def saved(self, node: Node) -> None:
        """Pins a node's new copy in the tiers, if a session has it pinned."""
        session = self._sessions.get(self._tips[node]) if node in self._tips else None
        if session is not None and session.expires > self._clock():
            self._pin(session)

    def forget(self, name: SessionName) -> None:
        """Removes a session and the cache entries that only it uses, on the device and in the tiers."""
        session = self._sessions.pop(name)
        self._unpin(session)
        path = session.path
        self._follow(session, ())
        doomed: set[Node] = set()
        keys: list[Key] = []
        for node in reversed(path):
            if node.parent is None:
                continue
            if node in self._users or not doomed.issuperset(node.children.values()):
                break
            doomed.add(node)
            if node.key is not None:
                keys.append(node.key)
            self._cache.drop(node)
        if keys and self._offload is not None:
            self._offload.submit(Forget(keys))

    def _follow(self, session: ConversationSession, path: tuple[Node, ...]) -> None:
        """Moves a session to another path of nodes."""
        self._users.update(path)
        for node in session.path:
            if self._users[node] == 1:
                del self._users[node]
            else:
                self._users[node] -= 1
        session.path = path

    def _pin(self, session: ConversationSession) -> None:
        self._keep(session, session.expires)

    def _unpin(self, session: ConversationSession) -> None:
        if session.path:
            self._tips.pop(session.path[-1], None)
        if session.expires > self._clock():
            self._keep(session, 0.0)

    def _keep(self, session: ConversationSession, until: float) -> None:
        tip = session.tip()
        if tip is None:
            return
        self._cache.keep(tip, until)
        if self._offload is not None and (keys := self._offload.chain_keys(tip)):
            self._offload.submit(Pin(keys, until))

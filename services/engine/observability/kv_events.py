"""Publisher of the prefix cache's changes over ZeroMQ, in vLLM's format for KV events.

Routers of other projects (llm-d's precise prefix scorer, NVIDIA Dynamo) index them, and send a prompt to where its
prefix is. A message has the topic, the number of the batch and a msgpack array, as vLLM's ZmqEventPublisher sends it.
Group 0 has whole KV blocks. Group 1 has state snapshots, which a hit needs as well: such an event has the tokens
between the last whole block and the snapshot, less than a block, so that readers without groups pass over it.
"""

from __future__ import annotations

import hashlib
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import msgspec
import structlog
import zmq

from services.common.errors import InvalidRequest, Unavailable
from services.engine.kv_cache.cache_journal import (
    BlockHashes,
    BlocksRemoved,
    BlocksStored,
    CacheChange,
    CacheCleared,
    HashedChange,
    SnapshotRemoved,
    SnapshotStored,
)
from services.engine.kv_cache.keys import Namespace
from services.engine.observability.events import CacheChanged, EngineEvent

_log = structlog.get_logger(__name__)

_MEDIUM = "GPU"
_BLOCKS, _SNAPSHOTS = 0, 1
"""Groups of events."""
_END = (-1).to_bytes(8, "big", signed=True)
"""Number that ends the answer to a request for earlier batches."""
_CLOSE_SECONDS = 5.0
_MOST_QUEUED = 100_000
"""Messages that wait for a subscriber, at most; it misses those beyond, and sees the gap in their numbers."""


class BlockStored(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Event of vLLM's format: blocks, or a snapshot, that can be used now."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = _MEDIUM
    lora_name: str | None = None
    extra_keys: list[list[str | int] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Event of vLLM's format: blocks, or a snapshot, that are gone."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Event of vLLM's format: the cache is empty."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Batch of vLLM's format."""

    ts: float
    """Seconds since 1970."""
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


@dataclass(frozen=True, slots=True)
class KvEventOptions:
    """Options of the publisher.

    Raises:
        InvalidRequest: an address that ZeroMQ has no use for, or a topic that cannot be told from the next frame.
    """

    endpoint: str
    """Address of the events, such as tcp://*:5557 to listen, or tcp://indexer:5557 to connect."""
    replay_endpoint: str
    """Address at which subscribers ask for earlier batches; empty: none."""
    topic: str
    batches_kept: int

    def __post_init__(self) -> None:
        for variable, address in (
            ("TEMPER_KV_EVENTS", self.endpoint),
            ("TEMPER_KV_EVENTS_REPLAY", self.replay_endpoint),
        ):
            if address and not address.startswith(("tcp://", "ipc://")):
                raise InvalidRequest(
                    f"{variable} is {address!r}, and must begin with tcp:// or ipc://, such as tcp://*:5557"
                )
        if self.batches_kept < 0:
            raise InvalidRequest(f"TEMPER_KV_EVENTS_KEPT is {self.batches_kept}, and must be at least 0")


class KvEventPublisher:
    """Publisher of KV events. ``listen`` takes the events of the loop's thread and never waits; a thread of its own
    hashes, encodes, sends, and answers requests for earlier batches.

    Raises:
        Unavailable: an address cannot be bound.
    """

    def __init__(self, options: KvEventOptions, block_size: int) -> None:
        self._topic = options.topic.encode()
        self._block_size = block_size
        self._hashes = BlockHashes(block_size)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=options.batches_kept)
        self._number = 0
        self._ended = False
        """True after an error that events could not go on behind."""
        self._queue: SimpleQueue[tuple[float, Sequence[CacheChange]] | None] = SimpleQueue()
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        try:
            self._events = self._open(zmq.PUB, options.endpoint, "TEMPER_KV_EVENTS")
            self._replay = (
                self._open(zmq.ROUTER, options.replay_endpoint, "TEMPER_KV_EVENTS_REPLAY")
                if options.replay_endpoint
                else None
            )
        except BaseException:
            self._context.destroy(linger=0)
            raise
        # Wakes the thread, which polls it beside the sockets.
        self._waking, self._woken = socket.socketpair()
        self._waking.setblocking(False)
        self._woken.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()
        self._put([CacheCleared()])  # of an engine that was here before

    def listen(self, event: EngineEvent) -> None:
        """Takes an event of the engine."""
        if isinstance(event, CacheChanged) and not self._ended:
            self._put(event.changes)

    def close(self) -> None:
        """Sends what is queued, and ends; a thread that does not get through with it keeps its sockets."""
        self._queue.put(None)
        self._wake()
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            _log.warning("KV events that were queued are not all sent")
            return
        self._waking.close()
        self._woken.close()
        self._context.destroy(linger=0)

    @property
    def address(self) -> str:
        """Address at which the events are, with the port that was chosen for port 0 or *."""
        return self._events.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def replay_address(self) -> str:
        """Address at which earlier batches are; empty: nowhere."""
        return "" if self._replay is None else self._replay.getsockopt_string(zmq.LAST_ENDPOINT)

    def _open(self, kind: int, address: str, variable: str) -> zmq.Socket[bytes]:
        """Socket at an address: one that listens where it has a wildcard or is a file, else one that connects, as
        vLLM's."""
        opened: zmq.Socket[bytes] = self._context.socket(kind)
        opened.set_hwm(_MOST_QUEUED)
        opened.setsockopt(zmq.LINGER, 0)
        listens = any(sign in address for sign in ("*", "::", "0.0.0.0")) or address.startswith("ipc://")
        try:
            if listens or kind == zmq.ROUTER:
                opened.bind(address)
            else:
                opened.connect(address)
        except zmq.ZMQError as error:
            raise Unavailable(f"cannot publish KV events at {address} ({variable}): {error.strerror}") from error
        return opened

    def _put(self, changes: Sequence[CacheChange]) -> None:
        self._queue.put((time.time(), changes))
        self._wake()

    def _wake(self) -> None:
        try:
            self._waking.send(b"\0")
        except (BlockingIOError, OSError):
            return  # it is awake, or has ended

    # On the thread.

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._woken.fileno() in ready:
                try:
                    if not self._send_queued():
                        return
                except Exception:  # what follows would be wrong without what was lost, and the queue must not grow
                    self._ended = True
                    _log.exception("KV events end here: routers take this cache for an empty one from now on")
                    self._send([AllBlocksCleared()], time.time())
            if self._replay is not None and self._replay in ready:
                try:
                    self._answer(self._replay)
                except zmq.ZMQError as error:  # of one subscriber
                    _log.warning("a request for earlier KV events was not answered", error=str(error))

    def _send_queued(self) -> bool:
        """Sends the batches in the queue; False: it was the last one."""
        try:
            while self._woken.recv(4096):
                pass
        except BlockingIOError:
            pass
        while True:
            try:
                item = self._queue.get_nowait()
            except Empty:
                return True
            if item is None:
                return False
            if self._ended:
                continue
            at, changes = item
            events = [self._encoded(hashed) for change in changes for hashed in self._hashes.follow(change)]
            if events:
                self._send(events, at)

    def _send(self, events: list[BlockStored | BlockRemoved | AllBlocksCleared], at: float) -> None:
        payload = self._encoder.encode(EventBatch(at, events, 0))
        number = self._number.to_bytes(8, "big")
        self._kept.append((self._number, payload))
        self._number += 1
        self._events.send_multipart((self._topic, number, payload))

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Answers a request for the batches from a number on with those that are kept."""
        frames = replay.recv_multipart(zmq.NOBLOCK)
        if len(frames) != 3 or len(frames[2]) != 8:
            _log.warning("a request for earlier KV events has other frames than an id, an empty one and 8 bytes")
            return
        peer, empty, first = frames
        for number, payload in self._kept:
            if number >= int.from_bytes(first, "big"):
                replay.send_multipart((peer, empty, number.to_bytes(8, "big"), payload))
        replay.send_multipart((peer, empty, _END, b""))

    def _encoded(self, change: HashedChange) -> BlockStored | BlockRemoved | AllBlocksCleared:
        match change:
            case BlocksStored():
                return self._stored(change.namespace, list(change.hashes), change.parent, change.token_ids, _BLOCKS)
            case SnapshotStored():
                return self._stored(change.namespace, [change.hash], change.parent, change.token_ids, _SNAPSHOTS)
            case BlocksRemoved():
                return BlockRemoved(list(change.hashes), _MEDIUM, _BLOCKS)
            case SnapshotRemoved():
                return BlockRemoved([change.hash], _MEDIUM, _SNAPSHOTS)
            case CacheCleared():
                return AllBlocksCleared()

    def _stored(
        self, namespace: Namespace, hashes: list[int], parent: int | None, tokens: Sequence[int], group: int
    ) -> BlockStored:
        keys = _keys(namespace)
        return BlockStored(
            hashes,
            parent,
            list(tokens),
            self._block_size,
            medium=_MEDIUM,
            lora_name=_name(namespace),
            extra_keys=None if keys is None else [keys] * len(hashes),
            group_idx=group,
            kv_cache_spec_kind=("full_attention", "mamba")[group],
        )


def _name(namespace: Namespace) -> str | None:
    """Name by which requests ask for the adapter, or for several together, "a*0.7+b"; None: the base."""
    source = namespace.source
    return None if source is None or not source.version else re.sub(r"@\d+", "", source.version)


def digest_number(digest: str) -> int:
    """Number below 2^63 that stands for an adapter's digest in extra keys."""
    return int.from_bytes(hashlib.sha256(digest.encode()).digest()[:8], "big") >> 1


def _keys(namespace: Namespace) -> list[str | int] | None:
    """What a block's hash covers beside its tokens; None: nothing. A salt is a secret, so its hash is told.

    The digest is told as a number: llm-d and Dynamo take text for the identifier of a picture, which no request to an
    adapter has, and pass over numbers, so that the adapter's name decides."""
    source = namespace.source
    if source is None:
        return [namespace.hex()]
    keys: list[str | int] = [digest_number(source.digest)] if source.digest else []
    return [*keys, f"salted:{namespace.hex()}"] if source.salted else keys or None

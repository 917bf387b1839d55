"""KV events as a subscriber of vLLM's format gets them: real ZeroMQ sockets, and an index made of nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import zmq

from services.common.errors import InvalidRequest, Unavailable
from services.engine.kv_cache.cache_journal import CacheCleared, NodeRemoved, NodeStored
from services.engine.kv_cache.keys import namespace_of, tokens_to_bytes
from services.engine.observability.events import CacheChanged
from services.engine.observability.kv_events import KvEventOptions, KvEventPublisher, digest_number
from services.engine.requests.adapter import AdapterPin
from tests.unit.engine.cache_index import CacheIndex, books
from tests.unit.engine.toy_engine import Engine

BLOCK = 4
PINS = (
    AdapterPin(),
    AdapterPin("polite@3", "digest of polite@3", 1),
    AdapterPin("polite@4", "digest of polite@4", 2),
    AdapterPin("brief@12*0.7+polite@3", "digest of both", 3),
)
NAMES = {
    digest_number("digest of polite@3"): "polite",
    digest_number("digest of polite@4"): "polite",
    digest_number("digest of both"): "brief*0.7+polite",
}
OPTIONS = KvEventOptions("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", "kv@pod@model", 10_000)
WAIT_MS = 20_000


def earlier(replay: zmq.Socket[bytes], first: int) -> list[tuple[int, bytes]]:
    """The batches that are kept, from a number on."""
    replay.send_multipart([b"", first.to_bytes(8, "big")])
    found: list[tuple[int, bytes]] = []
    while True:
        assert replay.poll(WAIT_MS)
        _, number, payload = replay.recv_multipart()
        if number == b"\xff" * 8:
            return found
        found.append((int.from_bytes(number, "big"), payload))


class Subscriber:
    """A router's end of the wire. It knows vLLM's arrays by their places, and nothing of Temper."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], publisher: KvEventPublisher) -> None:
        self.events = context.socket(zmq.SUB)
        self.events.connect(publisher.address)
        self.events.subscribe(b"kv@")
        self.replay = context.socket(zmq.DEALER)  # a REQ takes one answer to a question
        self.replay.connect(publisher.replay_address)
        self.index = CacheIndex(BLOCK)
        self.names: set[str | None] = set()
        self.next = 0

    def catch_up(self) -> None:
        """Asks for all batches from the next on."""
        for number, payload in earlier(self.replay, self.next):
            self._take(number, payload)

    def follow(self, last: int) -> None:
        """Takes what comes until a batch of this number."""
        while self.next <= last:
            assert self.events.poll(WAIT_MS)
            topic, number, payload = self.events.recv_multipart()
            assert topic == b"kv@pod@model"
            if int.from_bytes(number, "big") >= self.next:  # or it has come as an earlier one already
                self._take(int.from_bytes(number, "big"), payload)

    def _take(self, number: int, payload: bytes) -> None:
        assert number == self.next, "a gap"
        self.next += 1
        batch: list[Any] = msgspec.msgpack.decode(payload)
        assert batch[0] > 1.7e9
        assert batch[2] == 0
        for tag, *fields in batch[1]:
            if tag == "BlockStored":
                self._stored(*fields)
            elif tag == "BlockRemoved":
                hashes, medium, group = fields
                assert medium == "GPU"
                if group == 0:
                    self.index.remove_blocks(hashes)
                else:
                    del self.index.snapshots[hashes[0]]
            else:
                assert (tag, fields) == ("AllBlocksCleared", [])
                self.index = CacheIndex(BLOCK)

    def _stored(
        self,
        hashes: list[int],
        parent: int | None,
        tokens: list[int],
        size: int,
        lora_id: int | None,
        medium: str,
        name: str | None,
        keys: list[list[str | int]] | None,
        group: int,
        kind: str,
    ) -> None:
        assert (size, lora_id, medium) == (BLOCK, None, "GPU")
        assert kind == ("mamba" if group else "full_attention")
        assert all(0 < one < 2**64 for one in hashes)
        self.names.add(name)
        space = "/".join(map(str, keys[0])) if keys else ""
        assert keys is None or keys == [keys[0]] * len(hashes)
        adapters = [one for one in keys[0] if isinstance(one, int)] if keys else []
        assert name == (NAMES[adapters[0]] if adapters else None)
        if group == 0:
            self.index.store_blocks(space.encode(), hashes, parent, tokens)
        else:
            self.index.store_snapshot(space.encode(), hashes[0], parent, tokens)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def publisher() -> Iterator[KvEventPublisher]:
    publisher = KvEventPublisher(OPTIONS, BLOCK)
    yield publisher
    publisher.close()


def traffic(engine: Engine, publisher: KvEventPublisher, dice: random.Random, operations: int) -> None:
    """Random requests, steps and aborts in a small cache."""
    names: list[str] = []
    for count in range(operations):
        what = dice.random()
        if what < 0.3:
            family, length = dice.randrange(3), dice.randrange(1, 60)
            prompt = tuple(1 + (family * 7 + at * (1 + at // 20)) % 40 for at in range(length))
            names.append(f"r{count}")
            engine.add(
                names[-1],
                (*prompt, *(dice.randrange(1, 40) for _ in range(dice.randrange(6)))),
                max_tokens=dice.randrange(1, 8),
                pin=dice.choice(PINS),
                cache_salt=dice.choice(("", "", "secret")),
            )
        elif what < 0.35 and names:
            engine.scheduler.abort(dice.choice(names))
        elif engine.scheduler.has_work:
            engine.step()
        assert engine.scheduler.journal is not None
        if changes := engine.scheduler.journal.take():
            publisher.listen(CacheChanged(changes))


def test_an_index_made_of_events_is_what_the_engine_has(
    context: zmq.Context[zmq.Socket[bytes]], publisher: KvEventPublisher
) -> None:
    engine = Engine(cache_journal=True, num_blocks=48, num_slots=9, block_size=BLOCK)
    there = Subscriber(context, publisher)
    there.catch_up()
    traffic(engine, publisher, random.Random(1), 10_000)
    late = Subscriber(context, publisher)
    late.catch_up()
    there.follow(late.next - 1)
    blocks, snapshots, _ = books(engine.scheduler, BLOCK)
    assert len(blocks) > 10
    assert snapshots
    for one in (there, late):
        assert sorted(tokens for _, tokens in one.index.blocks.values()) == sorted(tokens for _, tokens in blocks)
        assert sorted(tokens for _, tokens in one.index.snapshots.values()) == sorted(tokens for _, tokens in snapshots)
        assert one.names == {None, *NAMES.values()}
    assert b"secret" not in b"".join(payload for _, payload in publisher._kept)


def test_batches_that_are_not_kept_any_more_are_a_gap(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    publisher = KvEventPublisher(replace(OPTIONS, batches_kept=2), BLOCK)
    try:
        replay = context.socket(zmq.DEALER)
        replay.connect(publisher.replay_address)
        for _ in range(4):
            publisher.listen(CacheChanged([CacheCleared()]))
        numbers: list[int] = []
        while not numbers or numbers[-1] < 4:
            numbers = [number for number, _ in earlier(replay, 0)]
        assert numbers == [3, 4]
    finally:
        publisher.close()


def test_an_engine_that_connects_to_an_index(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    index = context.socket(zmq.SUB)
    port = index.bind_to_random_port("tcp://127.0.0.1")
    index.subscribe(b"kv@")
    monitor = index.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    publisher = KvEventPublisher(replace(OPTIONS, endpoint=f"tcp://127.0.0.1:{port}", replay_endpoint=""), BLOCK)
    try:
        assert monitor.poll(WAIT_MS)
        number = -1
        while number < 1:  # what is sent while a subscription is on its way is lost
            publisher.listen(CacheChanged([CacheCleared()]))
            if index.poll(100):
                topic, sent, payload = index.recv_multipart()
                number = int.from_bytes(sent, "big")
                assert topic == b"kv@pod@model"
                assert msgspec.msgpack.decode(payload)[1] == [["AllBlocksCleared"]]
    finally:
        publisher.close()


def test_after_an_error_the_cache_counts_as_empty(
    context: zmq.Context[zmq.Socket[bytes]], publisher: KvEventPublisher
) -> None:
    """What is published behind a change that got lost would be wrong."""
    reader = Subscriber(context, publisher)
    publisher.listen(CacheChanged([NodeStored(0, None, namespace_of("", ""), 0, tokens_to_bytes(range(BLOCK)))]))
    publisher.listen(CacheChanged([NodeRemoved(7)]))
    while reader.next < 3:
        reader.catch_up()
    assert reader.index.blocks == {}
    publisher.listen(CacheChanged([NodeStored(1, None, namespace_of("", ""), 0, tokens_to_bytes(range(BLOCK)))]))
    publisher.close()
    assert [number for number, _ in publisher._kept] == [0, 1, 2]
    assert publisher._queue.empty()


def test_garbage_at_the_replay_socket_harms_nobody(
    context: zmq.Context[zmq.Socket[bytes]], publisher: KvEventPublisher
) -> None:
    stranger = context.socket(zmq.DEALER)
    stranger.connect(publisher.replay_address)
    for frames in ([b"x"], [b"", b"too long for a number"], [b"", b"1", b"2", b"3"], [b""]):
        stranger.send_multipart(frames)
    reader = Subscriber(context, publisher)
    reader.catch_up()
    assert reader.next == 1, "the empty cache of a start"


def test_addresses_that_cannot_be() -> None:
    with pytest.raises(InvalidRequest, match=r"TEMPER_KV_EVENTS is 'localhost:5557', and must begin with tcp://"):
        replace(OPTIONS, endpoint="localhost:5557")
    taken = KvEventPublisher(OPTIONS, BLOCK)
    try:
        with pytest.raises(Unavailable, match=r"cannot publish KV events at tcp://.*TEMPER_KV_EVENTS_REPLAY"):
            KvEventPublisher(replace(OPTIONS, replay_endpoint=taken.replay_address), BLOCK)
    finally:
        taken.close()

"""What each gateway is told of the others' requests."""

from __future__ import annotations

from services.common.pb import engine_pb2 as pb
from services.engine.server.stream_load import MANY_REQUESTS, MUCH_PREFILL, Load, StreamLoads


def asked(name: str, prefill: int, hashes: bytes = b"") -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=name, prompt_token_ids=[1] * prefill, expected_prefill=prefill, prefix_hashes=hashes
    )


def test_each_stream_is_told_of_all_requests_but_its_own() -> None:
    loads = StreamLoads()
    one, other, third = loads.open(), loads.open(), loads.open()
    one.submitted(asked("a", 100))
    one.submitted(asked("b", 30))
    other.submitted(asked("c", 7))
    assert (one.others, other.others, third.others) == (Load(1, 7), Load(2, 130), Load(3, 137))
    for _ in range(2):
        one.begun("a")
    one.begun("unknown")
    assert other.others == Load(2, 30), "what has a token waits for nothing"
    assert ("a" in one, len(one)) == (True, 2)
    one.ended("a")
    one.ended("a")
    assert (other.others, "a" in one) == (Load(1, 30), False)
    one.close()
    other.ended("c")
    assert loads.total == Load()


def test_much_to_compute_is_told_at_once_and_when_it_is_computed() -> None:
    loads = StreamLoads()
    told: dict[str, list[bytes]] = {"one": [], "other": []}
    one, other = (loads.open(heard.append) for heard in told.values())
    one.submitted(asked("a", MUCH_PREFILL, b"12345678"))
    one.submitted(asked("b", MUCH_PREFILL - 1, b"87654321"))
    one.begun("b")
    assert told == {"one": [], "other": [b"12345678"]}
    one.begun("a")
    one.begun("a")
    one.ended("a")
    assert told["other"] == [b"12345678", b""]
    other.close()
    one.submitted(asked("c", MUCH_PREFILL))
    one.close()
    assert told == {"one": [], "other": [b"12345678", b""]}, "who has gone is told nothing"
    assert loads.total == Load()


def test_many_requests_are_told_at_once_and_when_they_have_ended() -> None:
    """The choices of a prompt: only the first has much to compute, and how many they are nobody else would know."""
    loads = StreamLoads()
    told: list[Load] = []
    one, other = loads.open(), loads.open(lambda _hashes: told.append(other.others))
    one.submitted(asked("first", MUCH_PREFILL))
    for name in range(15):
        one.submitted(asked(str(name), 0))
    for name in range(15):
        one.ended(str(name))
    one.ended("first")
    assert [load.requests for load in told] == [1, 1 + MANY_REQUESTS, 1, 0]
    assert told[-1].prefill == 0


def test_a_request_is_no_more_load_than_its_prompt() -> None:
    loads = StreamLoads()
    one, other = loads.open(), loads.open()
    message = asked("a", 5)
    message.expected_prefill = 2**32 - 1
    one.submitted(message)
    assert other.others == Load(1, 5)
    one.ended("a")
    assert loads.total == Load()

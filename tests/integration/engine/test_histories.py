"""Sessions of a real engine: kept, saved, moved by disk and store, exported and imported, forgotten."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import pytest
import torch

from services.common.adapters.registry import AdapterRegistry
from services.common.errors import InvalidRequest, NotFound
from services.common.storage.object_store import ObjectStore
from services.engine.kv_cache.keys import Tier
from services.engine.requests.adapter import AdapterChoice
from services.engine.requests.conversation_session import SessionInfo, SessionName
from services.engine.requests.outputs import SequenceUpdate
from services.engine.requests.sampling_params import SamplingParams
from services.engine.requests.submission import Submission
from services.engine.settings import EngineSettings
from services.pod.engine import Engine, build_engine

CHAT = SessionName("alice", "chat")
PROMPT = tuple(random.Random(5).choices(range(5, 1500), k=300))


class Pod:
    """An engine of its own, with what it keeps below the device."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.desk = engine.sessions
        self._asked = 0

    def ask(self, prompt: tuple[int, ...], session: SessionName | None = CHAT, salt: str = "") -> tuple[list[int], int]:
        """The greedy answer, and how many tokens of the prompt came from the cache."""
        self._asked += 1
        updates: list[SequenceUpdate] = []
        ended = Event()

        def take(some: list[SequenceUpdate]) -> None:
            updates.extend(some)
            if some[-1].finish_reason is not None:
                ended.set()

        sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        asked = Submission(f"r{self._asked}", prompt, sampling, AdapterChoice(), cache_salt=salt, session=session)
        self.engine.loop.submit(asked, take)
        assert ended.wait(60)
        finished = updates[-1].finished
        assert finished is not None
        return list(finished.output_ids), finished.cached_tokens

    def kept(self, tier: Tier) -> int:
        return self.engine.tier_status()[tier].entries

    def until_kept(self, tier: Tier, entries: int = 1) -> None:
        deadline = time.monotonic() + 30
        while self.kept(tier) < entries:
            assert time.monotonic() < deadline, self.engine.tier_status()
            time.sleep(0.02)

    def settled(self) -> None:
        """Returns when the loop has heard of all that the tiers have done."""
        assert self.engine.tiers is not None
        assert self.engine.tiers.wait_idle(30)
        self.engine.loop.call_with_scheduler(lambda _: None).result(10)

    def forget_device(self) -> None:
        self.engine.loop.call_with_scheduler(lambda scheduler: scheduler.clear_cache()).result(10)


@pytest.fixture
def pods(
    registry: AdapterRegistry, engine_settings: EngineSettings, store: ObjectStore, tmp_path: Path
) -> Iterator[type]:
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:

        def start(tiers: str, directory: str = "disk", **changes: object) -> Pod:
            settings = engine_settings.model_copy(
                update={
                    "tiers": tiers,
                    "tier_disk_dir": tmp_path / directory,
                    "tier_host_bytes": 64 * 2**20,
                    "tier_store_poll_seconds": 0.2,
                    "tier_load_share": 1e6,  # a load is never late, however busy the machine
                    "trainer": False,
                    **changes,
                }
            )
            engine = build_engine(settings, registry, None, store=store)
            engine.start()
            stack.callback(engine.stop, 5.0)
            return Pod(engine)

        yield start


def reference(pod: Pod, prompt: tuple[int, ...]) -> list[int]:
    """Answer in a cache namespace of its own, so that nothing of it is cached."""
    answer, cached = pod.ask(prompt, None, salt=f"alone {len(prompt)}")
    assert cached == 0
    return answer


def next_turn(answer: list[int]) -> tuple[int, ...]:
    return (*PROMPT, *answer, 7, 8, 9)


def test_a_session_is_loaded_from_the_host_when_the_device_has_forgotten_it(pods: Callable[..., Pod]) -> None:
    pod = pods("host")
    answer, _ = pod.ask(PROMPT)
    pod.until_kept(Tier.HOST)
    pod.settled()
    pod.forget_device()
    turn = next_turn(answer)
    again, cached = pod.ask(turn)
    assert cached >= len(PROMPT) - 1
    assert again == reference(pod, turn)


def test_a_restarted_engine_goes_on_from_its_disk(pods: Callable[..., Pod]) -> None:
    first = pods("host,disk")
    answer, _ = first.ask(PROMPT)
    saved = first.desk.save(CHAT)
    assert saved.saved
    assert {"device", "host", "disk"} <= saved.sizes.keys()
    first.engine.stop(5.0)
    second = pods("host,disk")
    second.until_kept(Tier.HOST)
    second.settled()
    turn = next_turn(answer)
    again, cached = second.ask(turn)
    assert cached == len(PROMPT) + len(answer) - 1, "all but the last token, which was never fed back"
    assert again == reference(second, turn)


def test_what_is_pinned_outlives_the_engine_without_being_saved(pods: Callable[..., Pod]) -> None:
    first = pods("host,disk")
    answer, _ = first.ask(PROMPT)
    first.until_kept(Tier.HOST)
    first.settled()
    first.engine.stop(5.0)
    second = pods("disk")
    second.until_kept(Tier.DISK)
    second.settled()
    assert second.ask(next_turn(answer))[1] >= len(PROMPT) - 1


def test_another_engine_goes_on_from_the_store(pods: Callable[..., Pod]) -> None:
    first = pods("host,store", "one")
    answer, _ = first.ask(PROMPT)
    first.desk.save(CHAT)
    second = pods("host,store", "two")
    second.until_kept(Tier.STORE, first.kept(Tier.STORE))
    second.settled()
    turn = next_turn(answer)
    again, cached = second.ask(turn)
    assert cached >= len(PROMPT) - 1, "an object more for the tokens of the answer takes longer than computing them"
    assert again == reference(second, turn)


def test_a_damaged_file_is_a_miss(pods: Callable[..., Pod], tmp_path: Path) -> None:
    first = pods("disk")
    answer, _ = first.ask(PROMPT)
    first.desk.save(CHAT)
    first.engine.stop(5.0)
    damaged = 0
    for path in (tmp_path / "disk").rglob("*"):
        if path.is_file() and path.stat().st_size > 100_000:
            with path.open("r+b") as file:
                file.seek(path.stat().st_size // 2)
                byte = file.read(1)
                file.seek(-1, 1)
                file.write(bytes([byte[0] ^ 1]))
            damaged += 1
    assert damaged
    second = pods("disk")
    second.settled()
    turn = next_turn(answer)
    again, cached = second.ask(turn)
    assert (again, cached) == (reference(second, turn), 0)


def test_an_export_is_imported_elsewhere(pods: Callable[..., Pod]) -> None:
    first = pods("host", "one")
    answer, _ = first.ask(PROMPT)
    file = list(first.desk.export(CHAT))
    assert max(map(len, file)) <= 2**20
    second = pods("host", "two")
    taken = second.desk.import_file(CHAT, iter(file))
    assert isinstance(taken, SessionInfo)
    assert (taken.tokens, taken.requests) == (len(PROMPT) + len(answer) - 1, 1)
    turn = next_turn(answer)
    again, cached = second.ask(turn)
    assert cached == taken.tokens
    assert again == reference(second, turn)
    whole = b"".join(file)
    flipped = bytearray(whole)
    flipped[-100] ^= 1
    for broken, why in (
        (whole[:-9], "truncated|cut off"),
        (whole + b"x", "longer"),
        (b"no such file", "not an exported session"),
        (bytes(flipped), "damaged|checksums"),
    ):
        third = pods("host", f"three {why[:3]}")
        with pytest.raises(InvalidRequest, match=why):
            third.desk.import_file(CHAT, iter([broken]))
        assert third.desk.list("alice") == []
        third.engine.stop(1.0)


def test_a_forgotten_session_is_nowhere(pods: Callable[..., Pod], tmp_path: Path) -> None:
    pod = pods("host,disk")
    answer, _ = pod.ask(PROMPT)
    pod.desk.save(CHAT)
    pod.desk.delete(CHAT)
    pod.settled()
    assert (pod.kept(Tier.HOST), pod.kept(Tier.DISK)) == (0, 0)
    assert not [path for path in (tmp_path / "disk").rglob("*") if path.is_file() and path.stat().st_size > 100_000]
    for call in (pod.desk.get, pod.desk.delete, pod.desk.save):
        with pytest.raises(NotFound):
            call(CHAT)
    assert pod.ask(next_turn(answer), None)[1] == 0


def test_owners_and_salts_are_apart(pods: Callable[..., Pod]) -> None:
    pod = pods("host")
    answer, _ = pod.ask(PROMPT)
    bobs = SessionName("bob", "chat")
    assert pod.ask(next_turn(answer), bobs, salt="bob")[1] == 0
    assert [one.session for one in pod.desk.list("alice")] == [CHAT]
    assert [one.session for one in pod.desk.list("bob")] == [bobs]
    pod.desk.delete(bobs)
    assert pod.ask(next_turn(answer))[1] > 0


def test_without_a_durable_tier_nothing_is_saved(pods: Callable[..., Pod]) -> None:
    pod = pods("host")
    pod.ask(PROMPT)
    with pytest.raises(InvalidRequest, match="TEMPER_TIERS"):
        pod.desk.save(CHAT)
    assert not pod.desk.get(CHAT).saved


def test_a_lost_directory_is_a_miss(pods: Callable[..., Pod], tmp_path: Path) -> None:
    pod = pods("disk")
    answer, _ = pod.ask(PROMPT)
    pod.desk.save(CHAT)
    for path in [path for path in (tmp_path / "disk").rglob("*") if path.is_file()]:
        path.unlink(missing_ok=True)
    pod.forget_device()
    turn = next_turn(answer)
    again, _ = pod.ask(turn)
    assert again == reference(pod, turn)

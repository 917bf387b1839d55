"""Feedback on a real Valkey: one opinion of each voice, limits, and the API over it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
import redis

from services.common.errors import Conflict, NewerSchema, NotFound, Unavailable
from services.common.security.api_keys import Scope
from services.common.settings import CommonSettings
from services.gateway.server.app import create_app
from services.gateway.settings import GatewaySettings
from services.learning.feedback.record import Feedback
from services.learning.feedback.store import ROOT, FeedbackFilter, FeedbackStore
from tests.integration.servers import RunningServer
from tests.unit.gateway.key_file import Keys

Open = Callable[..., FeedbackStore]
ALL = FeedbackFilter(None)


@pytest.fixture
async def opened(valkey: RunningServer, settings: CommonSettings) -> AsyncIterator[Open]:
    stores: list[FeedbackStore] = []

    def make(*, max_bytes: int = 2**20, keep_seconds: float = 3600.0) -> FeedbackStore:
        stores.append(FeedbackStore(settings, max_bytes=max_bytes, keep_seconds=keep_seconds))
        return stores[-1]

    yield make
    for store in stores:
        await store.aclose()


def up(answer: str = "chatcmpl-1", **fields: Any) -> Feedback:
    return Feedback.model_validate({"completion_id": answer, "thumb": "up", **fields})


async def test_an_opinion_is_replaced_until_it_is_used(opened: Open, raw: redis.Redis) -> None:
    store, other = opened(), opened()
    first, outcome = await store.add("key-1", up(user="ann"))
    assert outcome == "created"
    changed, outcome = await other.add("key-1", up(user="ann", thumb="down"))
    assert (outcome, changed.id, changed.said.thumb, changed.created_at) == (
        "changed",
        first.id,
        "down",
        first.created_at,
    )
    assert changed.changed_at > first.changed_at
    others = [
        await store.add(owner, said)
        for owner, said in [
            ("key-2", up(user="ann")),
            ("key-1", up(user="bob")),
            ("key-1", up(user="ann", source="judge")),
            ("key-1", up("chatcmpl-1:1", user="ann")),
            ("key-1", Feedback(session_id="chatcmpl-1", score=0.5, user="ann")),
        ]
    ]
    assert {outcome for _, outcome in others} == {"created"}
    assert len(await store.list(ALL, limit=100)) == 6

    await store.mark_used([first.id, "fb_" + "0" * 26], "thumbs@1")
    await store.mark_used([first.id], "thumbs@1")
    again, outcome = await store.add("key-1", up(user="ann"))
    assert (outcome, again.id != first.id, again.used_by) == ("created", True, ())
    used = await store.get(first.id)
    assert (used.used_by, used.said.thumb) == (("thumbs@1",), "down")
    with pytest.raises(Conflict, match="used by thumbs@1"):
        await store.replace(used, up(user="ann"))
    third, outcome = await store.add("key-1", up(user="ann", thumb="down"))
    assert (outcome, third.id) == ("changed", again.id)
    assert await store.delete([again.id, again.id, first.id]) == 2
    assert (await store.add("key-1", up(user="ann")))[1] == "created", "nothing of the deleted ones is in its way"
    assert await store.delete_all(ALL) == 6
    assert raw.get(f"{ROOT}bytes") == "0"
    assert raw.keys(f"{ROOT}*") == [f"{ROOT}bytes"], "what is deleted leaves nothing"


async def test_what_is_said_again_word_for_word_counts_once(opened: Open) -> None:
    """Whoever has got no answer sends an opinion again, and a data set may have used it meanwhile."""
    store = opened()
    first, _ = await store.add("key-1", up(user="ann"))
    assert await store.add("key-1", up(user="ann")) == (first, "changed"), "nothing of it is new"
    await store.mark_used([first.id], "thumbs@1")
    again, outcome = await store.add("key-1", up(user="ann"))
    assert (again.id, again.changed_at, again.used_by, outcome) == (
        first.id,
        first.changed_at,
        ("thumbs@1",),
        "changed",
    )
    assert [one.id for one in await store.list(ALL, limit=9)] == [first.id]


async def test_a_script_that_is_repeated_counts_once(opened: Open, raw: redis.Redis) -> None:
    """The same opinion by many at once is one, and so are those of many users each."""
    stores = [opened() for _ in range(3)]
    many = [store.add("", up(user=str(user))) for store in stores for user in range(20) for _ in range(2)]
    made = await asyncio.gather(*many)
    assert sorted(outcome for _, outcome in made).count("created") == 20
    assert len({record.id for record, _ in made}) == 20
    sizes = [int(str(raw.hget(key, "size"))) for key in raw.keys(f"{ROOT}fb_*")]
    assert raw.get(f"{ROOT}bytes") == str(sum(sizes))


async def test_replacing_keeps_the_voice(opened: Open) -> None:
    store = opened()
    record, _ = await store.add("", up(user="ann"))
    changed = await store.replace(record, up(user="ann", thumb=None, comment="fine"))
    assert (changed.said.thumb, changed.said.comment) == (None, "fine")
    assert await store.replace(record, up(user="ann", thumb=None, comment="fine")) == changed
    with pytest.raises(Conflict, match="says of chatcmpl-1"):
        await store.replace(record, up(user="bob"))
    await store.delete([record.id])
    with pytest.raises(NotFound):
        await store.replace(record, up(user="ann"))


async def test_nothing_is_pushed_out(opened: Open) -> None:
    body = len(up(user="a").model_dump_json(exclude_none=True))
    store = opened(max_bytes=2 * body)
    kept = [(await store.add("", up(user=user)))[0] for user in "ab"]
    with pytest.raises(Unavailable, match="TEMPER_FEEDBACK_MAX_BYTES"):
        await store.add("", up(user="c"))
    with pytest.raises(Unavailable, match="TEMPER_FEEDBACK_MAX_BYTES"):
        await store.add("", up(user="a", comment="longer"))
    with pytest.raises(Unavailable, match="TEMPER_FEEDBACK_MAX_BYTES"):
        await store.replace(kept[0], up(user="a", comment="longer"))
    assert {record.id for record in await store.list(ALL, limit=9)} == {record.id for record in kept}
    await store.delete([kept[0].id])
    assert (await store.add("", up(user="c")))[1] == "created"


async def test_what_is_too_old_goes(opened: Open) -> None:
    store, brief = opened(), opened(keep_seconds=0.001)
    for user in "abc":
        await store.add("", up(user=user))
    await asyncio.sleep(0.01)
    last, _ = await brief.add("", up(user="d"))
    assert [record.id for record in await store.list(ALL, limit=9)] == [last.id]


async def test_a_later_release_is_not_read_as_this_one(opened: Open, raw: redis.Redis) -> None:
    store = opened()
    record, _ = await store.add("", up())
    raw.hset(ROOT + record.id, "schema", "2")
    with pytest.raises(NewerSchema):
        await store.get(record.id)


@pytest.fixture
async def api(valkey: RunningServer, settings: CommonSettings, tmp_path: Any) -> AsyncIterator[Callable[..., Any]]:
    keys = Keys(tmp_path / "keys.json")
    for name, scope in {"app": Scope.INFERENCE, "other": Scope.INFERENCE, "admin": Scope.ADMIN}.items():
        keys.add(name, scope)
    app = create_app(GatewaySettings(redis_url=settings.redis_url, api_keys_file=str(keys.path)))
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:

            async def ask(method: str, path: str, *, key: str = "app", **options: Any) -> httpx.Response:
                headers = {**keys.bearer(key), **options.pop("headers", {})}
                return await client.request(method, path, headers=headers, **options)

            yield ask


async def test_over_http(api: Callable[..., Any]) -> None:
    body = {"completion_id": "chatcmpl-1", "thumb": "up", "user": "ann", "metadata": {"page": "help"}}
    made = await api("POST", "/v1/feedback", json=body)
    assert made.status_code == 201, made.text
    record = made.json()
    assert record["object"] == "feedback"
    assert {name: record[name] for name in body} == body
    again = await api("POST", "/v1/feedback", json={**body, "thumb": "down"})
    assert (again.status_code, again.json()["id"]) == (200, record["id"])
    once = {"idempotency-key": "k"}
    sent = [await api("POST", "/v1/feedback", json={**body, "user": "bob"}, headers=once) for _ in range(2)]
    assert [answer.status_code for answer in sent] == [201, 201]
    assert (await api("POST", "/v1/feedback", json={**body, "user": "eve"}, key="other")).status_code == 201

    listed = (await api("GET", "/v1/feedback?limit=1")).json()
    assert (listed["has_more"], listed["data"][0]["user"]) == (True, "bob")
    rest = (await api("GET", f"/v1/feedback?limit=1&after={listed['data'][0]['id']}")).json()
    assert (rest["has_more"], rest["data"][0]["thumb"]) == (False, "down")
    everybody = (await api("GET", "/v1/feedback?answer=chatcmpl-1", key="admin")).json()
    assert [one["user"] for one in everybody["data"]] == ["eve", "bob", "ann"]
    assert (await api("GET", "/v1/feedback?user=eve")).json()["data"] == []
    lines = (await api("GET", "/v1/feedback/export?source=user")).text.splitlines()
    assert len(lines) == 2

    path = f"/v1/feedback/{record['id']}"
    for method, options in {"GET": {}, "PUT": {"json": body}, "DELETE": {}}.items():
        assert (await api(method, path, key="other", **options)).status_code == 404
    put = await api("PUT", path, json={**body, "score": 0.25})
    assert (put.status_code, put.json()["score"]) == (200, 0.25)
    assert (await api("DELETE", path)).json()["deleted"] is True
    assert (await api("GET", path)).status_code == 404
    assert (await api("DELETE", "/v1/feedback")).status_code == 400
    assert (await api("DELETE", "/v1/feedback?user=bob", key="other")).json()["deleted"] == 0
    assert (await api("DELETE", "/v1/feedback?user=bob")).json()["deleted"] == 1
    assert (await api("DELETE", "/v1/feedback?label=none", key="admin")).json()["deleted"] == 0


NONSENSE: list[tuple[dict[str, Any], str]] = [
    ({}, "completion_id"),
    ({"completion_id": "a"}, "score"),
    ({"completion_id": "a", "session_id": "b", "thumb": "up"}, "session_id"),
    ({"completion_id": "a", "score": 1.5}, "score"),
    ({"completion_id": "a", "score": True}, "score"),
    ({"completion_id": "a", "thumb": "sideways"}, "thumb"),
    ({"completion_id": "a", "preferred_over": "a"}, "preferred_over"),
    ({"session_id": "a", "preferred_over": "b"}, "preferred_over"),
    ({"completion_id": "a\nb", "thumb": "up"}, "completion_id"),
    ({"completion_id": "a", "thumb": "up", "source": "me"}, "source"),
    ({"completion_id": "a", "thumb": "up", "metadata": {"k": "v" * 513}}, "metadata.k"),
    ({"completion_id": "a", "label": "two words"}, "label"),
    ({"completion_id": "a", "correction": "x" * 65537}, "correction"),
    ({"completion_id": "a", "thumbs": "up"}, "thumbs"),
]


async def test_nonsense_is_refused_by_field(api: Callable[..., Any]) -> None:
    for body, param in NONSENSE:
        answer = await api("POST", "/v1/feedback", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text

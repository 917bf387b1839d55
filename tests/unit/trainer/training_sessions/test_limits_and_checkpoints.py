"""Training sessions: the memory that they share with jobs, the engine's limits, and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.common.adapters.names import AdapterVersion
from services.common.errors import (
    AdapterRejected,
    DoesNotFit,
    InvalidRequest,
    NotFound,
    Overloaded,
)
from services.trainer.memory.budget import MemoryNeed
from tests.training_support import TrainingHost, random_adapter
from tests.unit.trainer.training_sessions.office import DATA, Office, train


def test_a_job_and_a_session_share_the_budget(checkpoint: Path) -> None:
    host = TrainingHost(checkpoint, train_memory_bytes=40 * 2**20)
    office = Office(host)
    session = office.open(lora={"rank": 16}, max_tokens_per_microbatch=64)
    resident = host.memory_budget.held()[session].resident
    assert resident == 16 * office.manager.get(session)["parameters"]
    held = host.memory_budget.held()[session]
    host.memory_budget.reserve_job(
        MemoryNeed(resident=host.memory_budget.total - held.resident - held.working, working=0)
    )
    with pytest.raises(DoesNotFit, match="the running job holds"):
        office.open(lora={"rank": 16}, max_tokens_per_microbatch=64)
    assert set(host.memory_budget.held()) == {session, "the running job"}
    assert office.manager.counts == (1, 4), "what was refused is not open"


def test_what_is_too_long_for_the_memory_is_refused_with_the_plan(checkpoint: Path) -> None:
    host = TrainingHost(checkpoint, train_memory_bytes=6 * 2**20)
    office = Office(host)
    with pytest.raises(DoesNotFit, match=r"the memory plan leaves 6\.0 MiB"):
        office.open(lora={"rank": 4}, max_tokens_per_microbatch=4096)
    session = office.open(lora={"rank": 4}, max_tokens_per_microbatch=16)
    with pytest.raises(DoesNotFit, match=r"data\[1\] with 399 tokens needs"):
        office.run(session, "forward", 1, data=[*DATA[:1], {"token_ids": [5] * 400}])


def test_limits_of_the_engine(host: TrainingHost) -> None:
    office = Office(host, sessions_max=1, session_call_tokens=600, session_ttl_max_seconds=60, session_ttl_seconds=60)
    session = office.open(lora={"rank": 4})
    with pytest.raises(Overloaded, match="1 training sessions are open in this engine, of 1"):
        office.open()
    cases: list[tuple[dict[str, Any], str, str]] = [
        (
            {"data": [{"token_ids": [5] * 513}]},
            r"data\[0\] has 513 tokens and the limit .* is 512",
            "data[0]",
        ),
        ({"data": [{"token_ids": [5, 416]}]}, r"data\[0\].token_ids has the token id 416", "data[0].token_ids"),
        ({"data": [{"token_ids": [5], "targets": [999]}]}, r"data\[0\].targets has the token id", "data[0].targets"),
        ({"data": [{"token_ids": [5] * 400}] * 2}, "the call has 800 tokens and one call may have 600", "data"),
    ]
    for fields, message, param in cases:
        with pytest.raises(InvalidRequest, match=message) as refused:
            office.send(session, "forward", 1, **fields)
        assert str(refused.value.param).startswith(param)
    assert office.manager.get(session)["next_seq"] == 1, "what is refused takes no place in the line"
    with pytest.raises(InvalidRequest, match="ttl_seconds is 61"):
        office.open(ttl_seconds=61)
    with pytest.raises(InvalidRequest, match=r"lora\.rank is 64"):
        Office(host).open(lora={"rank": 64})


def test_save_and_load(office: Office) -> None:
    session = office.open(lora={"rank": 4, "seed": 3})
    train(office, session, 1)
    saved = office.run(session, "save", 3, name="mine", attach=True)
    assert (saved["adapter"], saved["attached"]) == ("mine@1", True)
    assert office.publisher.served == [("mine@1", True)]
    kept = office.run(session, "save", 4, checkpoint="half-way")
    assert (kept["checkpoint"], kept["step"]) == ("half-way", 1)
    later = [train(office, session, seq) for seq in (5, 7, 9)]

    # The same session, back to the checkpoint: bit by bit the same again, moments and all.
    assert office.run(session, "load", 11, checkpoint="half-way")["step"] == 1
    assert [train(office, session, seq) for seq in (12, 14, 16)] == later
    # A new session of it, in which nothing was configured.
    again = office.open(checkpoint="half-way")
    assert [train(office, again, seq) for seq in (1, 3, 5)] == later
    # A version has the weights and a fresh optimizer: the first loss is the same, what follows is not.
    version = office.open(adapter="mine@1")
    assert office.manager.get(version)["adapter"] == "mine@1"
    fresh = [train(office, version, seq) for seq in (1, 3, 5)]
    assert fresh[0] == later[0]
    assert fresh[2] != later[2]
    assert office.run(version, "save", 7, name="mine")["adapter"] == "mine@2"
    assert office.registry.manifest(AdapterVersion("mine", 2)).parent == "mine@1"


def test_load_forgets_gradients_and_failure_changes_nothing(office: Office) -> None:
    session = office.open(lora={"rank": 4})
    office.run(session, "save", 1, checkpoint="start")
    office.run(session, "forward_backward", 2, loss="cross_entropy", data=DATA)
    before = office.run(session, "forward", 3, data=DATA)["loss"]
    with pytest.raises(NotFound, match="there is no checkpoint 'nothing'"):
        office.run(session, "load", 4, checkpoint="nothing")
    assert office.run(session, "forward", 5, data=DATA)["loss"] == before
    office.run(session, "load", 6, checkpoint="start")
    with pytest.raises(InvalidRequest, match="there is no gradient to apply"):
        office.run(session, "optim_step", 7)


def test_foreign_and_damaged_checkpoints_are_refused(office: Office) -> None:
    session = office.open(lora={"rank": 4})
    office.run(session, "save", 1, checkpoint="good")
    key = "sessions/checkpoints/good.safetensors"
    data = office.store.get(key).data
    office.store.put(key, data[: len(data) // 2])
    with pytest.raises(AdapterRejected, match="checkpoint 'good' is damaged"):
        office.run(session, "load", 2, checkpoint="good")
    office.store.put(key, data.replace(b'base_digest\\": \\"test', b'base_digest\\": \\"TEST'))
    with pytest.raises(AdapterRejected, match="belongs to base model TEST"):
        office.run(session, "load", 3, checkpoint="good")
    with pytest.raises(AdapterRejected, match="belongs to base model TEST"):
        office.open(checkpoint="good")
    assert office.manager.counts == (1, 4)


def test_a_given_shape_must_agree_with_what_is_continued(office: Office) -> None:
    office.registry.publish("old", random_adapter(office.host, rank=4), base_digest="test")
    with pytest.raises(InvalidRequest, match=r"lora\.rank is 8, but the adapter"):
        office.open(adapter="old", lora={"rank": 8})
    session = office.open(adapter="old", lora={"rank": 4})
    assert office.manager.get(session)["lora"]["rank"] == 4

"""Calls of training sessions: what is refused, where entries of a list belong, what ids say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from services.common.errors import InvalidRequest
from services.common.jobs.training_sessions.calls import (
    CALL,
    MAX_SAMPLES,
    Forward,
    ForwardBackward,
    Load,
    OpenSession,
    OptimStep,
    Sample,
    Save,
    check_tokens,
)
from services.common.jobs.training_sessions.data import Datum
from services.common.jobs.training_sessions.names import future_id, future_session, session_id, session_instance

RL = {"token_ids": [5, 6], "advantages": [0, 1], "logprobs": [0, -1]}


def test_entries_belong_to_their_token_or_to_the_target() -> None:
    own = Datum(token_ids=[5, 6, 7], weights=[0, 2, 3], logprobs=[9e-4, -1, -2], advantages=[0, 4, 5])
    assert (own.inputs, own.predicted, own.effective_weights) == ([5, 6], [6, 7], [2, 3])
    assert (own.aligned("logprobs"), own.aligned("advantages"), own.unpredicted) == ([-1, -2], [4, 5], 1)
    next_ = Datum(token_ids=[5, 6, 7], targets=[1, 2, 3], weights=[4, 0, 6])
    assert (next_.inputs, next_.predicted, next_.effective_weights) == ([5, 6, 7], [1, 2, 3], [4, 0, 6])
    assert next_.unpredicted == 0
    assert Datum(token_ids=[5, 6]).effective_weights == [1.0]
    with pytest.raises(ValueError, match="advantages was not given"):
        next_.aligned("advantages")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"kind": "forward_backward", "data": [{"token_ids": [5, 6]}]}, "loss"),
    ({"kind": "forward_backward", "loss": "ppo", "data": [RL], "loss_config": {"cap": 2}}, "no setting cap"),
    ({"kind": "forward_backward", "loss": "cispo", "data": [RL], "loss_config": {"clip_high": 2}}, "it has: cap"),
    ({"kind": "forward", "data": [{"token_ids": [5, 6]}], "loss_config": {"cap": 2}}, "it has: none"),
    ({"kind": "forward", "data": [{"token_ids": [5, 6]}], "temperature": 0}, "greater than 0"),
    ({"kind": "forward", "data": [{"token_ids": []}]}, "at least 1"),
    ({"kind": "forward", "data": [{"token_ids": [5, 6], "targets": [5]}]}, "targets has 1 entries"),
    ({"kind": "forward", "data": [{"token_ids": [5, 2**32]}]}, "less than"),
    ({"kind": "forward", "data": [{"token_ids": [5, 6.5]}]}, "valid integer"),
    ({"kind": "forward", "data": [{"token_ids": [5, 6], "weights": [0, 1e10]}]}, "less than or equal to"),
    ({"kind": "forward", "data": [{**RL}]}, "does not take"),
    ({"kind": "forward", "loss": "ppo", "data": [{**RL, "logprobs": [0, 0.5]}]}, "less than or equal to 0.001"),
    ({"kind": "optim_step", "beta1": 1}, "less than 1"),
    ({"kind": "optim_step", "max_grad_norm": 0}, "greater than 0"),
    ({"kind": "sample", "prompts": [], "max_tokens": 3}, "at least 1"),
    ({"kind": "sample", "prompts": [[]], "max_tokens": 3}, "at least 1"),
    ({"kind": "sample", "prompts": ["a"]}, "max_tokens"),
    ({"kind": "sample", "prompts": ["a", "b"], "n": MAX_SAMPLES, "max_tokens": 3}, "over the limit of 1024"),
    ({"kind": "save", "checkpoint": "a", "name": "b"}, "exactly one of"),
    ({"kind": "save", "checkpoint": "a", "attach": True}, "cannot be attached"),
    ({"kind": "save", "checkpoint": "a/b"}, "checkpoint name"),
    ({"kind": "save", "name": "base"}, "reserved"),
    ({"kind": "load"}, "exactly one of"),
    ({"kind": "load", "adapter": "a@0"}, "positive number"),
    ({"kind": "delete"}, "does not match any"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_what_is_wrong_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CALL.validate_json(json.dumps({"seq": 1, **fields}))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("field", ["weights", "advantages", "logprobs"])
def test_numbers_that_are_none_are_refused_by_name(field: str, number: str) -> None:
    datum = {"token_ids": [5, 6], "advantages": [0, 1], "logprobs": [0, -1], "weights": [0, 1]}
    text = json.dumps({"kind": "forward", "seq": 1, "loss": "ppo", "data": [{**datum, field: [0, "X"]}]})
    with pytest.raises(ValidationError) as refused:
        CALL.validate_json(text.replace('"X"', number))
    assert refused.value.errors()[0]["loc"] == ("forward", "data", 0, field, 1)


def test_a_session_starts_from_one_thing() -> None:
    with pytest.raises(ValidationError, match="not both"):
        OpenSession(adapter="a", checkpoint="b")
    with pytest.raises(ValidationError, match="adapter name"):
        OpenSession(adapter="../a")
    with pytest.raises(ValidationError, match="greater than 0"):
        OpenSession(ttl_seconds=0)


def test_tokens_are_checked_against_the_engine() -> None:
    def refused(call: Any, **limits: int) -> str:
        with pytest.raises(InvalidRequest) as error:
            check_tokens(call, **{"vocab_size": 100, "max_train_tokens": 8, "max_call_tokens": 12, **limits})
        return str(error.value.param)

    ok = [Datum(token_ids=[5] * 6)]
    assert refused(Forward(seq=1, data=[*ok, Datum(token_ids=[5] * 9)])) == "data[1].token_ids"
    assert refused(Forward(seq=1, data=[Datum(token_ids=[5, 100])])) == "data[0].token_ids"
    assert refused(Forward(seq=1, data=[Datum(token_ids=[5], targets=[100])])) == "data[0].targets"
    assert refused(ForwardBackward(seq=1, loss="cross_entropy", data=ok * 3)) == "data"
    assert refused(Sample(seq=1, prompts=["text", [5, 100]], max_tokens=1)) == "prompts[1]"
    assert refused(Sample(seq=1, prompts=["text"], max_tokens=1, stop_token_ids=[100])) == "stop_token_ids"
    for call in (OptimStep(seq=1), Save(seq=1, name="a"), Load(seq=1, adapter="a"), Forward(seq=1, data=ok * 2)):
        check_tokens(call, vocab_size=100, max_train_tokens=8, max_call_tokens=12)
    check_tokens(Forward(seq=1, data=ok * 99), vocab_size=0, max_train_tokens=0, max_call_tokens=0)


hexes = st.text("0123456789abcdef", min_size=12, max_size=12)


@given(hexes, hexes, st.integers(1, 2**53 - 1), st.text("0123456789abcdef", min_size=6, max_size=6))
def test_ids_say_where_things_are(instance: str, serial: str, seq: int, nonce: str) -> None:
    session = session_id(instance, serial)
    assert session_instance(session) == instance
    assert future_session(future_id(session, seq, nonce)) == session


@given(st.text())
def test_other_texts_are_no_ids(text: str) -> None:
    assert session_instance(text) is None
    assert future_session(text) is None

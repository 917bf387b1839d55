"""Another server as a target: who gets which key, what is kept of it, and log-likelihoods out of completions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError

from services.common.errors import InvalidRequest
from services.common.evaluation.suites.spec import SuiteSampling
from services.common.jobs.kinds.evaluate import RemoteTarget
from services.common.jobs.scorers.allowed_webhooks import Webhooks
from services.trainer.evaluation.other_server import OtherServer
from services.trainer.evaluation.questions import Question
from services.trainer.evaluation.targets import Asked, Continuation
from services.trainer.settings import TrainerSettings
from tests.unit.common.jobs.scorers.test_webhook import Reply, Seen, Server, serving

KEY = "sk-of-the-other-server"
ASKED = Continuation("q1", Question("Red or", text="Red or"), " blue")


def target(server: Server, keys: dict[str, str] | None = None, path: str = "/v1") -> OtherServer:
    webhooks = Webhooks(allowed=(server.url,), keys=keys or {}, attempts=1)
    return OtherServer(RemoteTarget(url=server.url + path, model="theirs"), webhooks, "targets[0]")


def ok(text: str, logprobs: Any) -> Reply:
    return 200, {}, json.dumps({"choices": [{"text": text, "logprobs": logprobs}]}).encode()


def likelihood(reply: Reply, asked: Continuation = ASKED) -> tuple[float, int, int]:
    with serving(lambda _: reply) as server:
        (found,) = target(server).likelihoods([asked], lambda: None)
    return found.logprob, found.tokens, found.bytes


def echoed(offsets: list[int], values: list[float | None], text: str = "Red or blue!") -> Reply:
    return ok(
        text, {"text_offset": offsets, "token_logprobs": values, "tokens": [""] * len(offsets), "top_logprobs": None}
    )


def test_a_key_is_sent_below_its_prefix_and_never_kept() -> None:
    def answer(seen: Seen) -> Reply:
        said = seen.headers.get("authorization", "no key")
        if seen.path.startswith("/refuse"):
            return 400, {}, f"not with {said}".encode()
        body = {"choices": [{"message": {"content": f"you sent {said}"}, "finish_reason": "stop"}]}
        return 200, {}, json.dumps(body).encode()

    asked = [Asked(Question("?", ({"role": "user", "content": "?"},)), 1)]
    with serving(answer) as server:
        keys = {f"{server.url}/v1": KEY, f"{server.url}/refuse": KEY, "https://elsewhere.example/v1": "sk-elsewhere"}
        for path, text, error in (
            ("/v1", "you sent Bearer ***", None),
            ("/v10", "you sent no key", None),
            ("/refuse/v1", "", "it answered with status 400: not with Bearer ***"),
        ):
            (said,) = target(server, keys, path).answer(asked, SuiteSampling(), lambda: None)
            assert (said.text, said.error) == (text, error)
        sent = [seen.headers.get("authorization") for seen in server.seen]
    assert sent == [f"Bearer {KEY}", None, f"Bearer {KEY}"]
    assert KEY not in repr(Webhooks(keys={"https://a.example": KEY}))


def test_a_server_that_wants_a_key_says_where_it_is_set() -> None:
    with serving(lambda _: (401, {}, b"who are you?")) as server:
        for keys, said in (({}, "without a key"), ({server.url: KEY}, "with the key of TEMPER_TARGET_KEYS")):
            with pytest.raises(InvalidRequest, match=said) as refused:
                target(server, keys).likelihoods([ASKED], lambda: None)
            assert KEY not in refused.value.message


def test_likelihoods_come_out_of_a_prompt_that_is_repeated() -> None:
    # "Red", " or", " bl", "ue", "!": what is sampled behind the prompt does not count.
    assert likelihood(echoed([0, 3, 6, 9, 11], [None, -1.0, -0.5, -0.25, -9.0])) == (-0.75, 2, 5)
    # "Red", " or bl", "ue": a token that begins in the prompt and ends in the text counts.
    assert likelihood(echoed([0, 3, 9, 11], [None, -1.0, -0.25, -9.0])) == (-1.25, 2, 5)
    alone = Continuation("q1", Question("", text=""), "Red or blue")
    assert likelihood(echoed([0, 3, 6, 11], [None, -1.0, -0.5, -9.0]), alone) == (-1.5, 2, 11)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (ok(" sky", {"text_offset": [11], "token_logprobs": [-1.0]}), "the prompt is not repeated"),
        (ok("Red or blue!", None), "with echo and logprobs"),
        (echoed([0, 3, 6, 11], [None, None, None, -1.0]), "with echo and logprobs"),
        (echoed([0], [None]), "with echo and logprobs"),
        ((200, {}, b"no JSON"), "with echo and logprobs"),
        ((400, {}, b"echo is not supported"), "gives no log-likelihood: it answered with status 400: echo is not"),
        ((404, {}, b""), "answered with status 404"),
    ],
)
def test_a_server_that_gives_none_is_named(reply: Reply, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as refused:
        likelihood(reply)
    assert "theirs at http" in refused.value.message


def test_conversations_have_no_text_to_continue() -> None:
    asked = Continuation("q7", Question("?", ({"role": "user", "content": "?"},)), "yes")
    with serving(lambda _: None) as server, pytest.raises(InvalidRequest, match=r"item 'q7'.*prompt_format"):
        target(server).likelihoods([asked], lambda: None)
    assert server.seen == []


def test_keys_are_read_from_the_settings_and_wrong_ones_named_without_them() -> None:
    settings = TrainerSettings(target_keys=SecretStr("https://a.example/v1=sk-a=b, http://b:8000=sk-c"))
    assert settings.keys_by_prefix == {"https://a.example/v1": "sk-a=b", "http://b:8000": "sk-c"}
    assert "sk-a" not in repr(settings)
    for wrong, said in (("sk-lost", "entry 1"), ("https://a.example=x,https://b.example=", "entry 2")):
        with pytest.raises(ValidationError, match=said) as refused:
            TrainerSettings(target_keys=SecretStr(wrong))
        assert "sk-lost" not in str(refused.value)

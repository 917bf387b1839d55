"""This server as another one's target: log-likelihoods out of /v1/completions are those of /v1/score."""

from __future__ import annotations

import httpx
import pytest

from services.common.jobs.kinds.evaluate import RemoteTarget
from services.common.jobs.scorers.allowed_webhooks import Webhooks
from services.trainer.evaluation.other_server import OtherServer
from services.trainer.evaluation.questions import Question
from services.trainer.evaluation.targets import Continuation
from tests.stack import Stack


def test_echoed_likelihoods_are_the_engines(stack: Stack) -> None:
    texts = [" Paris", " Lima und Zürich ☃"]
    target = OtherServer(
        RemoteTarget(url=f"{stack.url}/v1", model=stack.served_model_name), Webhooks(allowed=(stack.url,)), "targets[0]"
    )
    question = Question("The capital of France is", text="The capital of France is")
    found = target.likelihoods([Continuation(str(n), question, text) for n, text in enumerate(texts)], lambda: None)
    for one, text in zip(found, texts, strict=True):
        body = {"model": stack.served_model_name, "prompt": question.text, "completion": text}
        answer = httpx.post(f"{stack.url}/v1/score", json=body, timeout=60, trust_env=False)
        values = answer.json()["data"][0]["token_logprobs"]
        assert (one.logprob, one.tokens) == (pytest.approx(sum(values), abs=1e-3), len(values))

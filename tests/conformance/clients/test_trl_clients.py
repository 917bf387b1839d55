"""TRL's own clients of vLLM, unchanged, against the whole system. Their bodies alone: tests/conformance/test_trl."""

from __future__ import annotations

import json
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.clients.agents import OFFLINE
from tests.conformance.clients.place import HERE, PYTHON
from tests.conformance.clients.recorder import Recording
from tests.conformance.test_dynamic_adapters import http, saved
from tests.stack import Stack

__all__ = ["http", "saved"]


@pytest.fixture
def found(recording: Recording, saved: Path, tmp_path: Path) -> Any:
    done = subprocess.run(
        [PYTHON, HERE / "scripts" / "trl_clients.py", recording.url, sysconfig.get_path("purelib"), str(saved)],
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": str(tmp_path),
            "LANG": "C.UTF-8",
            "HF_HUB_OFFLINE": "1",
            **OFFLINE,
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=600,  # it imports torch and transformers
    )
    assert done.returncode == 0, done.stderr
    assert recording.refusals == []
    return json.loads(done.stdout.splitlines()[-1])


def test_its_clients_run_as_they_are(found: Any, stack: Stack) -> None:
    server = found["server"]
    assert (server["model"], server["world"]) == (stack.served_model_name, 1)
    for name, count, width in (("generated", 4, 3), ("digits", 1, 1), ("chat", 4, 1)):
        answer = server[name]
        assert len(answer["completion_ids"]) == count
        parts = (answer[key] for key in ("completion_ids", "logprobs", "logprob_token_ids"))
        for ids, logprobs, named in zip(*parts, strict=True):
            assert len(ids) == len(logprobs) == len(named)
            assert all(1 <= len(place) <= width for place in logprobs)
            assert all(token in place for token, place in zip(ids, named, strict=True)), (
                "what was sampled is among them"
            )
    assert server["generated"]["prompt_ids"] == [[20, 21, 22, 23], [30, 31, 32]]
    teacher = server["teacher"]
    for ids, tokens, values in zip(
        server["generated"]["completion_ids"][::2], teacher["actual_token_ids"], teacher["logprobs"], strict=True
    ):
        assert [token for (token,) in tokens] == ids
        assert all(len(place) == 4 and place == sorted(place, reverse=True) for place in values)
    policy = found["async"]
    assert policy["length"] > 0
    assert policy["dtype"] == "torch.float32"
    assert (policy["world"], policy["lora"]["max_loras"] >= 2) == (1, True)
    assert len(policy["tokens"]) == len(policy["logprobs"]) > 0
    assert all(value <= 0 for value in policy["logprobs"])

"""Tinker's SDK beside a loop of one's own: `python -m benchmarks.training.tinker_losses --steps 100`.

The same data, seed and optimizer twice, step by step: by the `tinker` package, and by calls of a training session over
HTTP. Starts a whole `temper up` with the tiny model, or takes --url. One JSON line:

- steps, tokens_per_step
- first_loss, last_loss: of a token
- largest_difference: of the losses of one step, relative
- largest_gradient_difference: of the gradients' norms
- sdk_seconds, direct_seconds: of a step, median
- exact: whether every loss was the same number
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import tinker
from tinker import types

from benchmarks.lib.environment import environment
from benchmarks.lib.recorder import put_line
from benchmarks.serving.http_latency import running_stack

_ADAM: dict[str, Any] = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.01}
_LORA: dict[str, Any] = {"rank": 16, "seed": 1}


class Direct:
    """A training session, call by call."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=300, trust_env=False)
        answer = self._http.post("/v1/train/sessions", json={"lora": {**_LORA, "alpha": 32.0}})
        self._session = answer.raise_for_status().json()["id"]
        self._seq = 0

    def send(self, call: str, **body: Any) -> str:
        self._seq += 1
        answer = self._http.post(f"/v1/train/sessions/{self._session}/{call}", json={"seq": self._seq, **body})
        return str(answer.raise_for_status().json()["id"])

    def result(self, future: str) -> dict[str, Any]:
        while True:
            found = self._http.get(f"/v1/train/futures/{future}", params={"wait": 30}).raise_for_status().json()
            if found["state"] != "pending":
                return dict(found["result"])

    def close(self) -> None:
        self._http.delete(f"/v1/train/sessions/{self._session}")
        self._http.close()


def batch(step: int) -> list[list[int]]:
    """Four sequences of a step: runs of a few patterns, so that there is something to learn."""
    chance = random.Random(step)
    return [[40 + (start + 7 * place) % 60 for place in range(48)] for start in chance.sample(range(60), 4)]


def measure(url: str, steps: int) -> dict[str, Any]:
    """The figures, in the fields above."""
    service = tinker.ServiceClient(base_url=url, api_key="tml-none")
    model = tinker.RestClient(base_url=url, api_key="tml-none").get_server_capabilities().result().supported_models[0]
    training = service.create_lora_training_client(str(model.model_name), **_LORA).result()
    direct = Direct(url)
    seconds: dict[str, list[float]] = {"sdk": [], "direct": []}
    losses, gaps, gradient_gaps = [], [], []
    for step in range(steps):
        rows = batch(step)
        data = []
        for row in rows:
            inputs: dict[str, Any] = {"target_tokens": row[1:]}
            data.append(types.Datum(model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs=inputs))
        began = time.perf_counter()
        forward = training.forward_backward(data, "cross_entropy")
        taken = training.optim_step(types.AdamParams(**_ADAM, grad_clip_norm=1.0))
        loss = forward.result().metrics["loss:sum"]
        norm = (taken.result().metrics or {})["grad_norm:mean"]
        between = time.perf_counter()
        future = direct.send("forward_backward", loss="cross_entropy", data=[{"token_ids": row} for row in rows])
        stepped = direct.send("optim_step", **_ADAM, max_grad_norm=1.0)
        expected, expected_norm = direct.result(future)["loss"], direct.result(stepped)["grad_norm"]
        seconds["sdk"].append(between - began)
        seconds["direct"].append(time.perf_counter() - between)
        losses.append(loss / sum(len(row) - 1 for row in rows))
        gaps.append(abs(loss - expected) / expected)
        gradient_gaps.append(abs(norm - expected_norm) / expected_norm)
    direct.close()
    service.close("success").result()
    return {
        "steps": steps,
        "tokens_per_step": sum(len(row) - 1 for row in batch(0)),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "largest_difference": max(gaps),
        "largest_gradient_difference": max(gradient_gaps),
        "sdk_seconds": statistics.median(seconds["sdk"]),
        "direct_seconds": statistics.median(seconds["direct"]),
        "exact": max(gaps) == 0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a running gateway; default: a `temper up` of its own")
    parser.add_argument("--model", type=Path, default=Path("models/tiny"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with nullcontext((options.url, 0.0)) if options.url else running_stack(options.model) as (url, _):
        line = measure(url, options.steps)
    put_line(line | environment(), options.out)


if __name__ == "__main__":
    main()

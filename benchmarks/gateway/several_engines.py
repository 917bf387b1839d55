"""Several engines of one host behind one gateway: `python -m benchmarks.gateway.several_engines --out FILE`.

`temper up --engines N` for one engine and for --engines of them, a GPU each, on a checkpoint with random weights; one
JSON line a fleet and case, and one of what the larger fleet shares. There are as many gateways on the one port as
engines with a GPU. Cases are REQUESTSxPROMPTxNEW for each engine: two engines get twice the requests of one.

- decode_tok_s, first tokens, and CPU cores of engines and gateway, as in benchmarks.gateway.http.rates; times: the rate
  over that of one engine
- beside_job: tokens a second of the last case while one engine runs a training job, over that without it
- attach_seconds: until every engine answers with the version that the job made, from the request that attaches it, by
  the answer of /v1/adapters/{name}/attach; serving: how many do
- killed: one engine gets SIGKILL in the middle of the last case: answers that were whole, cut, and refused, and the
  seconds until all engines are ready again
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.gateway.http.rates import Stack, measure
from benchmarks.lib.cases import Case
from benchmarks.lib.environment import environment
from benchmarks.lib.random_checkpoint import checkpoint
from benchmarks.lib.recorder import put_line
from benchmarks.serving.http_latency import started

_PATIENCE = 300.0
_VOCABULARY = 2000
"""Random prompts have tokens below it: every model has those."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """A running `temper up`."""

    port: int
    processes: dict[str, psutil.Process]
    http: httpx.Client

    @property
    def engines(self) -> list[str]:
        """Names of the engines' processes."""
        return [name for name in self.processes if name.startswith("engine")]

    @property
    def gateways(self) -> int:
        """Gateway processes, which share the port."""
        return sum(name.startswith("gateway") for name in self.processes)

    @property
    def ready(self) -> int:
        """Engines that the gateway takes for ready."""
        return sum(one["ready"] for one in self.http.get("/healthz").json()["engines"])

    def await_ready(self, engines: int) -> float:
        """Seconds until so many are.

        Raises:
            TimeoutError: they do not get ready.
        """
        began = time.monotonic()
        while self.ready < engines:
            if time.monotonic() - began > _PATIENCE:
                raise TimeoutError(f"{engines} engines were not ready within {_PATIENCE:g} s")
            time.sleep(0.02)
        return time.monotonic() - began

    def stack(self) -> Stack:
        """What benchmarks.gateway.http.rates measures."""
        model = self.http.get("/v1/models").json()["data"][0]["id"]
        return Stack("127.0.0.1", self.port, model, _VOCABULARY, {}, self.processes)


@contextmanager
def running(model: Path, engines: int, device: str) -> Iterator[Fleet]:
    """`temper up` with so many engines, all of them ready.

    Raises:
        RuntimeError, TimeoutError: they do not get ready.
    """
    with started(model, "--engines", str(engines), "--device", device, quiet=False) as ready:
        pids: dict[str, int] = ready["pids"]
        parts = {name: psutil.Process(pid) for name, pid in pids.items() if name not in ("valkey", "s3")}
        many = httpx.Limits(max_connections=None)
        with httpx.Client(base_url=ready["url"], timeout=_PATIENCE, trust_env=False, limits=many) as http:
            fleet = Fleet(http.base_url.port or 80, parts, http)
            fleet.await_ready(engines)
            yield fleet


def rates(fleet: Fleet, cases: Sequence[Case], clients: int) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Figures of each case, which is for one engine."""
    for case in cases:
        yield case, measure(fleet.stack(), _for_all(fleet, case), clients)


def _for_all(fleet: Fleet, case: Case) -> Case:
    return replace(case, requests=case.requests * len(fleet.engines))


def shared(fleet: Fleet, case: Case, alone: float, clients: int, *, steps: int, tokens: int) -> dict[str, Any]:
    """A job on one engine while all serve, what it made on all of them, and an engine that is killed.

    Args:
        alone: tokens a second of the case without the job.
        steps: of the job, on one example of `tokens` tokens each.
    """
    engines = len(fleet.engines)
    job = _submit(fleet.http, steps, tokens)
    _until(lambda: _job(fleet.http, job)["progress"]["step"] > 0, "the job's first step")
    beside = measure(fleet.stack(), _for_all(fleet, case), clients)["decode_tok_s"]
    still_running = _job(fleet.http, job)["state"] == "running"
    _until(lambda: _job(fleet.http, job)["state"] not in ("queued", "running"), "the job's end")
    state = _job(fleet.http, job)["state"]
    began = time.perf_counter()
    attached = fleet.http.post("/v1/adapters/several/attach").raise_for_status().json()
    attach_seconds = time.perf_counter() - began
    return {
        "job": state,
        "beside_job": round(beside / alone, 4),
        "job_outlasted_the_case": still_running,
        "attach_seconds": round(attach_seconds, 4),
        "serving": attached["engines_serving"],
        "killed": _kill(fleet, _for_all(fleet, case)) | {"engines": engines},
    }


def _submit(http: httpx.Client, steps: int, tokens: int) -> str:
    # A token or more a word, whatever the tokenizer is.
    words = " ".join(f"{7 * number % 97}" for number in range(max(2, tokens // 4)))
    body = {
        "adapter": "several",
        "examples": [{"prompt": words, "completion": words}],
        "epochs": steps,
        "batch_size": 1,
        "attach": False,
    }
    answer = http.post("/v1/train/sft", json=body)
    answer.raise_for_status()
    return str(answer.json()["id"])


def _job(http: httpx.Client, job: str) -> dict[str, Any]:
    found: dict[str, Any] = http.get(f"/v1/train/jobs/{job}").raise_for_status().json()
    return found


def _until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {_PATIENCE:g} s")
        time.sleep(0.05)


def _kill(fleet: Fleet, case: Case) -> dict[str, Any]:
    """Kills an engine while the case's requests run, each in a thread of its own."""
    ends: list[str] = []
    prompt = list(range(20, 20 + case.prompt_tokens))
    model = fleet.stack().model
    some = threading.Semaphore(0)

    def ask(number: int) -> None:
        body = {
            "model": model,
            "prompt": [number % _VOCABULARY, *prompt[1:]],
            "max_tokens": case.new_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        end = "cut"
        try:
            with fleet.http.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    end = f"refused: {answer.status_code}"
                else:
                    for line in answer.iter_lines():
                        some.release()
                        end = "whole" if line == "data: [DONE]" else end
        except httpx.HTTPError as error:
            end = f"broken: {type(error).__name__}"
        ends.append(end)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(case.requests)]
    for thread in threads:
        thread.start()
    some.acquire()
    os.kill(fleet.processes[fleet.engines[-1]].pid, signal.SIGKILL)
    began = time.monotonic()
    _until(lambda: fleet.ready < len(fleet.engines), "the gateway's notice of the death")
    noticed = time.monotonic() - began
    for thread in threads:
        thread.join()
    fleet.await_ready(len(fleet.engines))
    return {
        "answers": {end: ends.count(end) for end in sorted(set(ends))},
        "noticed_seconds": round(noticed, 3),
        "back_seconds": round(time.monotonic() - began, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3.5-4b", help="directory or the name of a shape, as in serving")
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm/temper-bench"))
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--cases", default="64x512x256,256x512x256", help="for each engine")
    parser.add_argument("--clients", type=int, default=8, help="client processes")
    parser.add_argument("--steps", type=int, default=60, help="of the job beside")
    parser.add_argument("--tokens", type=int, default=2048, help="of its example, about")
    parser.add_argument("--out", type=Path, help="append each line to this file")
    options = parser.parse_args()
    cases = [Case.parse(part) for part in options.cases.split(",")]
    model = checkpoint(options.model, options.scratch)
    common = {"model": options.model} | environment()
    single: dict[Case, float] = {}
    for engines in (1, options.engines):
        with running(model, engines, options.device) as fleet:
            alone = 0.0
            for case, found in rates(fleet, cases, options.clients):
                alone = found["decode_tok_s"]
                times = round(alone / single.setdefault(case, alone), 4)
                put_line(common | {"engines": engines, "gateways": fleet.gateways, "times": times} | found, options.out)
            if engines > 1:
                found = shared(fleet, cases[-1], alone, options.clients, steps=options.steps, tokens=options.tokens)
                put_line(common | {"engines": engines} | found, options.out)


if __name__ == "__main__":
    main()

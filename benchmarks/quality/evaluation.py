"""How long an evaluation takes: 1,000 short items on the tiny model, through the gateway of a running Temper.

temper up --model models/tiny &
python -m benchmarks.quality.evaluation
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.lib.recorder import put_line

ITEMS = 1000
BAR_SECONDS = 120.0


def suite(items: int) -> dict[str, Any]:
    """Sums with an answer of a few tokens."""
    lines = (
        json.dumps(
            {
                "prompt": f"What is {number % 100} plus {number // 100 + 3}?",
                "expected": number % 100 + number // 100 + 3,
            }
        )
        for number in range(items)
    )
    return {"name": "thousand", "scorer": {"type": "exact"}, "sampling": {"max_tokens": 8}, "jsonl": "\n".join(lines)}


def measure(url: str, items: int) -> dict[str, Any]:
    """Runs the suite; seconds from the submission to the result."""
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        made = client.post("/v1/eval/suites", json=suite(items)).raise_for_status().json()
        began = time.monotonic()
        run = client.post("/v1/evaluations", json={"suites": [made["id"]]}).raise_for_status().json()["id"]
        while (found := client.get(f"/v1/evaluations/{run}").raise_for_status().json())["state"] in (
            "queued",
            "running",
        ):
            time.sleep(0.2)
        seconds = time.monotonic() - began
    if found["state"] != "succeeded":
        raise RuntimeError(f"the evaluation {found['state']}: {found['reason']}")
    (summary,) = found["summaries"]
    return {
        "items": items,
        "seconds": round(seconds, 1),
        "items_per_second": round(items / seconds, 1),
        "bar_seconds": BAR_SECONDS,
        "mean": summary["mean"],
        "tokens_mean": summary["tokens_mean"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8420")
    parser.add_argument("--items", type=int, default=ITEMS)
    parser.add_argument("--save", type=Path, help="file of results, JSON lines")
    args = parser.parse_args()
    found = measure(args.url, args.items)
    put_line(found, args.save)


if __name__ == "__main__":
    main()

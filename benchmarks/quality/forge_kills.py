"""Whether a forge run that is killed goes on and ends in the same bytes: `python -m benchmarks.quality.forge_kills`.

A recipe with all stages runs once as it is. Then it is started, killed with -9 after a random time and started again,
until so many processes were killed; each time that it ends, its output is compared with the first one's, file by file,
nothing may be left beside it, and it begins anew. CPU, float32, the tiny model.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from benchmarks.lib.random_checkpoint import TINY
from benchmarks.lib.recorder import put_line
from services.forge.files import file_digest

_EXAMPLES = [{"prompt": f"What is {n} plus 4?", "completion": str(n + 4)} for n in range(12)]
_ITEMS = [{"prompt": f"What is {n} plus {n + 1}?", "expected": str(2 * n + 1)} for n in range(70)]
_RECIPE = {
    "model": str(TINY.resolve()),
    "output": "out/model",
    "data": "data.jsonl",
    "suites": ["sums.jsonl"],
    "sign": "key.pem",
    "importance": {"method": "leave_one_out", "sample_tokens": 64},
    "prune": {"layers": 2, "kv_groups": 1, "cycles": 2},
    "recover": {"steps": 3, "batch_tokens": 32, "save_every": 1, "eval_every": 2, "on_policy": 0.5},
    "quantize": "float8",
}


class Runs:
    """One recipe, run again and again in a directory."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self.out = home / "out"
        (home / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in _EXAMPLES))
        (home / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in _ITEMS))
        (home / "sums.json").write_text(json.dumps({"scorer": {"type": "exact"}, "sampling": {"max_tokens": 4}}))
        key = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (home / "key.pem").write_bytes(key)
        (home / "recipe.yaml").write_text(json.dumps(_RECIPE))

    def start(self, seconds: float | None) -> str | None:
        """Runs the recipe; the stage in which it was killed after so many seconds, None: it has ended.

        Raises:
            RuntimeError: it failed.
        """
        command = [sys.executable, "-m", "services.pod.forging", "run", "--recipe", str(self._home / "recipe.yaml")]
        events = self._home / "events.jsonl"
        with events.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, start_new_session=True)
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                status = process.wait()
        told = [json.loads(line) for line in events.read_text().splitlines() if line.endswith("}")]
        if told and told[-1]["event"] == "result":  # and was killed on its way out, if at all
            return None
        if status == -signal.SIGKILL:
            return str(told[-1]["stage"]).partition(":")[0].rpartition(" ")[2] if told else "start"
        raise RuntimeError(f"the run ended with {status}: {told[-1:]}")

    def taken(self) -> dict[str, str]:
        """Digests of the output's files, which go, as all of it does."""
        if left := [path.name for path in self.out.iterdir() if path.name != "model"]:
            raise RuntimeError(f"left beside the output: {left}")
        found = {path.name: file_digest(path) for path in sorted((self.out / "model").iterdir())}
        shutil.rmtree(self.out)
        return found


def measure(runs: Runs, kills: int, seed: int) -> dict[str, Any]:
    """Kills so many processes, and goes on until the last run has ended."""
    began = time.monotonic()
    runs.start(None)
    whole, seconds = runs.taken(), time.monotonic() - began
    chance, killed, ended, same = random.Random(seed), Counter[str](), 0, 0
    while killed.total() < kills or runs.out.exists():
        after = chance.uniform(0, seconds) if killed.total() < kills else None
        if (stage := runs.start(after)) is not None:
            killed[stage] += 1
            print(f"killed {killed.total()} of {kills} in {stage}", file=sys.stderr, flush=True)
        else:
            ended += 1
            same += runs.taken() == whole
    return {
        "kills": killed.total(),
        "killed_in": dict(sorted(killed.items())),
        "ended": ended,
        "ended_in_the_same_bytes": same,
        "files": len(whole),
        "seconds_of_a_whole_run": round(seconds, 1),
        "seed": seed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="file of results, JSON lines")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        found = measure(Runs(Path(home)), args.kills, args.seed)
    put_line(found, args.save)


if __name__ == "__main__":
    main()

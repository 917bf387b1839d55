"""`python -m services.forge`: the steps of `temper forge`. Its output: services.adapter_tools.events."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from services.adapter_tools.events import Reporter, run_to_the_end
from services.common.jobs.kinds.forge import IMPORTANCE_METHODS
from services.engine.models.weights.shards import SHARD_BYTES
from services.forge.importance.settings import Settings
from services.forge.steps import compact_step, importance_step, prune_step, quantize_step, verify_step
from services.forge.units import KINDS


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m services.forge")
    commands = parser.add_subparsers(dest="command", required=True)

    def step(name: str, *, plans: bool, writes: bool) -> argparse.ArgumentParser:
        command = commands.add_parser(name)
        command.add_argument("--model", type=Path, required=True)
        command.add_argument("--out", type=Path, required=True)
        if plans:
            command.add_argument("--dry-run", action="store_true")
        if writes:
            command.add_argument("--max-shard-bytes", type=int, default=SHARD_BYTES)
            command.add_argument("--sign", type=Path)
        return command

    importance = step("importance", plans=False, writes=False)
    importance.add_argument("--method", choices=IMPORTANCE_METHODS, required=True)
    importance.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    importance.add_argument("--data", type=Path)
    importance.add_argument("--data-name")
    importance.add_argument("--max-tokens", type=int)
    importance.add_argument("--tokens-per-forward", type=int, default=4096)
    importance.add_argument("--sample-tokens", type=int, default=1024)
    importance.add_argument("--seed", type=int, default=0)
    importance.add_argument("--device", default="cpu")
    prune = step("prune", plans=True, writes=False)
    prune.add_argument("--scores", type=Path, required=True)
    for kind in KINDS:
        prune.add_argument(f"--{kind.replace('_', '-')}")
    compact = step("compact", plans=True, writes=True)
    compact.add_argument("--cut", type=Path, required=True)
    step("quantize", plans=True, writes=True)
    verify = commands.add_parser("verify")
    verify.add_argument("--model", type=Path, required=True)
    verify.add_argument("--key", type=Path, required=True)
    return parser.parse_args(argv)


def _importance(given: argparse.Namespace) -> dict[str, Any]:
    settings = Settings(
        method=given.method,
        kinds=given.kinds,
        tokens_per_forward=given.tokens_per_forward,
        sample_tokens=given.sample_tokens,
        seed=given.seed,
    )
    return importance_step(
        given.model,
        given.out,
        settings,
        data=given.data,
        data_name=given.data_name,
        max_tokens=given.max_tokens,
        device=given.device,
        progress=Reporter(),
    )


def _prune(given: argparse.Namespace) -> dict[str, Any]:
    levels = {kind: getattr(given, kind) for kind in KINDS if getattr(given, kind) is not None}
    return prune_step(given.model, given.scores, given.out, levels, dry_run=given.dry_run, progress=Reporter())


def _compact(given: argparse.Namespace) -> dict[str, Any]:
    return compact_step(
        given.model,
        given.cut,
        given.out,
        max_shard_bytes=given.max_shard_bytes,
        sign=given.sign,
        dry_run=given.dry_run,
        progress=Reporter(),
    )


def _quantize(given: argparse.Namespace) -> dict[str, Any]:
    return quantize_step(
        given.model,
        given.out,
        max_shard_bytes=given.max_shard_bytes,
        sign=given.sign,
        dry_run=given.dry_run,
        progress=Reporter(),
    )


def _verify(given: argparse.Namespace) -> dict[str, Any]:
    return verify_step(given.model, given.key, progress=Reporter())


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    given = _arguments(argv)
    steps = {
        "importance": _importance,
        "prune": _prune,
        "compact": _compact,
        "quantize": _quantize,
        "verify": _verify,
    }
    return run_to_the_end(lambda: steps[given.command](given))


if __name__ == "__main__":
    raise SystemExit(main())

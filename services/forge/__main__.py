"""`python -m services.forge`: the steps of `temper forge`. Its output: services.adapter_tools.events."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from services.adapter_tools.events import Reporter, run_to_the_end
from services.common.errors import InvalidRequest
from services.common.jobs import LoraSettings, OptimizerSettings
from services.common.jobs.kinds.forge import IMPORTANCE_METHODS
from services.common.validation.errors import problem
from services.engine.models.registry import read_config
from services.engine.models.weights.shards import SHARD_BYTES
from services.forge.importance.settings import Settings
from services.forge.recovery.settings import (
    METHODS as RECOVERY_METHODS,
)
from services.forge.recovery.settings import (
    OPTIMIZER_STATES,
    RECOMPUTES,
    TRAINS,
    RecoverySettings,
)
from services.forge.steps import compact_step, importance_step, prune_step, quantize_step, verify_step
from services.forge.units import KINDS

M = TypeVar("M", bound=BaseModel)


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
    recovery = step("recover", plans=True, writes=True)
    recovery.add_argument("--data", type=Path, required=True)
    recovery.add_argument("--data-name")
    recovery.add_argument("--held-out", type=Path)
    recovery.add_argument("--teacher", type=Path)
    recovery.add_argument("--state", type=Path, required=True)
    recovery.add_argument("--method", choices=RECOVERY_METHODS, required=True)
    recovery.add_argument("--trains", choices=TRAINS, required=True)
    for name in ("steps", "batch-tokens", "tokens-per-forward", "max-new-tokens", "eval-every", "save-every"):
        recovery.add_argument(f"--{name}", type=int, required=True)
    recovery.add_argument("--patience", type=int)
    recovery.add_argument("--learning-rate", type=float)
    recovery.add_argument("--warmup-steps", type=int, required=True)
    recovery.add_argument("--schedule", choices=("constant", "linear", "cosine"), required=True)
    recovery.add_argument("--optimizer-states", choices=OPTIMIZER_STATES, required=True)
    recovery.add_argument("--lora-rank", type=int, required=True)
    recovery.add_argument("--on-policy", type=float, required=True)
    recovery.add_argument("--recompute", choices=RECOMPUTES, required=True)
    recovery.add_argument("--memory-bytes", type=int)
    recovery.add_argument("--seed", type=int, required=True)
    recovery.add_argument("--device", required=True)
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


def _recover(given: argparse.Namespace) -> dict[str, Any]:
    # Imported here: the other steps need no trainer.
    from services.forge.recovery.recover import recover

    optimizer = {"schedule": given.schedule, "warmup_steps": given.warmup_steps, "learning_rate": given.learning_rate}
    settings = RecoverySettings(
        method=given.method,
        trains=given.trains,
        steps=given.steps,
        batch_tokens=given.batch_tokens,
        tokens_per_forward=given.tokens_per_forward,
        optimizer=_checked(OptimizerSettings, optimizer),
        optimizer_states=given.optimizer_states,
        lora=_checked(LoraSettings, {"rank": given.lora_rank, "alpha": 2.0 * given.lora_rank}),
        on_policy=given.on_policy,
        max_new_tokens=given.max_new_tokens,
        eval_every=given.eval_every,
        patience=given.patience,
        save_every=given.save_every,
        recompute=given.recompute,
        seed=given.seed,
        device=given.device,
    )
    if given.dry_run:
        return _planned_recovery(given, settings)
    report = recover(
        given.model,
        given.out,
        settings,
        data=given.data,
        data_name=given.data_name,
        held_out=given.held_out,
        teacher=given.teacher,
        state=given.state,
        memory_bytes=given.memory_bytes,
        max_shard_bytes=given.max_shard_bytes,
        sign=given.sign,
        progress=Reporter(),
    )
    if report is None:
        raise RuntimeError("a recovery that nobody stops has ended without a report")
    with contextlib.suppress(OSError):  # somebody else's files are in it
        given.state.rmdir()
    return report.summary()


def _planned_recovery(given: argparse.Namespace, settings: RecoverySettings) -> dict[str, Any]:
    import torch

    from services.forge.pipeline.needs import Rates, recovery_seconds, rounded
    from services.forge.recovery.memory import available_bytes
    from services.forge.recovery.plan import RecoveryPlan

    progress = Reporter()
    with contextlib.ExitStack() as stack:
        work = RecoveryPlan.of(
            given.model,
            settings,
            stack,
            data=given.data,
            data_name=given.data_name,
            held_out=given.held_out,
            teacher=given.teacher,
            progress=progress,
        )
        device = torch.device(settings.device)
        available = available_bytes(device) if given.memory_bytes is None else given.memory_bytes
        work.check(settings, given.out, given.state, available)
        rates = Rates.measured(settings.device, progress)
        teacher = None if given.teacher is None else read_config(given.teacher)
        seconds = recovery_seconds(work.base.config, teacher, settings, rates)
        plan = work.summary(settings, available)
    estimated = {"seconds": rounded(seconds), "seconds_are": "estimated", "measured_flops": round(rates.flops)}
    return {"out": None, "plan": plan | estimated}


def _checked(model: type[M], values: dict[str, Any]) -> M:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise InvalidRequest(problem(error, model, values)) from error


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
        "recover": _recover,
        "quantize": _quantize,
        "verify": _verify,
    }
    return run_to_the_end(lambda: steps[given.command](given))


if __name__ == "__main__":
    raise SystemExit(main())

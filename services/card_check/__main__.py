"""`python -m services.card_check`, for `temper doctor`: one JSON object a line on standard output, as of
services.adapter_tools; the last one has the findings, by check."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from services.card_check.finding import Finding, failure, ok, skipped
from services.common.errors import TemperError
from services.common.shutdown import end_on_signals
from services.engine.kv_cache.memory_plan import format_bytes
from services.engine.settings import EngineSettings
from services.pod.preflight import read_settings, use_kernel_cache

_SETTINGS = "set the variable that it names, or TEMPER_DEVICE=cpu"


def main() -> int:
    """Returns the exit status: 1 if the settings cannot be read or torch is not there."""
    end_on_signals()
    try:
        settings, _ = read_settings()
        use_kernel_cache(settings)
    except TemperError as error:
        _emit("error", message=error.message, code=error.code)
        return 1
    _emit("progress", stage="loading torch", done=0, total=0)
    try:
        findings = _findings(settings)
    except ModuleNotFoundError as error:
        _emit("error", message=f"{error.name} is not installed: pip install 'temper[engine]'")
        return 1
    _emit("result", findings=findings)
    return 0


def _findings(settings: EngineSettings) -> dict[str, Finding]:
    import torch

    if not torch.cuda.is_available():
        # Read when Triton is imported.
        os.environ["TRITON_INTERPRET"] = "1"
    from services.card_check.kernel import try_kernel
    from services.card_check.torch_and_driver import Versions, judge
    from services.pod.device import Device, check_device

    found = {"torch": judge(Versions.here(), settings.device)}
    _emit("progress", stage="trying a kernel", done=0, total=0)
    try:
        device = Device.of(settings)
    except TemperError as error:
        unknown = skipped("there is no such device")
        return found | {"device": failure(error.message, _SETTINGS), "memory": unknown, "kernel": unknown}
    found["device"] = _refused(lambda: check_device(settings, device)) or ok(_described(device))
    found["memory"] = _memory(settings, device)
    found["kernel"] = try_kernel(device.torch)
    return found


def _described(device: Any) -> str:
    if device.limits is None:
        return "the CPU can do what the settings ask"
    limits = device.limits
    return (
        f"{limits.name}: compute capability {'.'.join(map(str, limits.capability))}, {limits.multiprocessors} "
        f"multiprocessors, {limits.shared_memory // 1024} KiB of shared memory ({limits.size} cuts), "
        f"{limits.memory / 2**30:.0f} GiB"
    )


def _memory(settings: EngineSettings, device: Any) -> Finding:
    from services.common.text.tokenizer import TextCodec
    from services.engine.models.interface import resolve_dtype
    from services.engine.models.registry import read_config
    from services.pod.memory import device_bytes, plan
    from services.pod.teacher import second_config

    try:
        config = read_config(settings.model)
        dtype = resolve_dtype(settings.dtype, device.torch)
        available = device_bytes(device, int(settings.device_memory))
        chosen, made = plan(
            config,
            settings,
            dtype,
            device,
            available,
            second_config(settings, TextCodec.from_directory(settings.model)),
        )
    except TemperError as error:
        lines = error.message.splitlines()
        return failure(lines[0], " ".join(line.strip() for line in lines[1:]) or _SETTINGS)
    return ok(
        f"of {format_bytes(available)}, {format_bytes(made.weights)} are weights; {chosen.max_num_seqs} requests run "
        f"at once, {made.capacity_tokens:,} tokens of KV, {chosen.adapter_slots} adapters, "
        f"{format_bytes(made.training)} for training"
    )


def _refused(check: Callable[[], None]) -> Finding | None:
    try:
        check()
    except TemperError as error:
        return failure(error.message, _SETTINGS)
    return None


def _emit(event: str, **fields: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())

"""The demo's chat and training jobs on this GPU, held to the limits of other cards, one Temper each, all at once:
`python -m benchmarks.serving.cards.limits sm80`, or `sm89 sm90` for two that share the GPU.

Further settings of one stand behind its limits, which is how one run tells what a failure depends on:
`sm80 sm80:TEMPER_KV_CACHE_BYTES=64MiB sm80:TEMPER_TIERS=,TEMPER_CUDA_GRAPHS=0`. With
`sm80:TRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas` the toolkit's assembler takes the place of the one in Triton.

A line for each says how it ended; behind it, of one that did not get through, the error as its engine logged it.
``--blocking``: the host waits for each launch, and no serving step is captured (CUDA_LAUNCH_BLOCKING,
TEMPER_CUDA_GRAPHS=0), so that a kernel that leaves its tensors is the one in the traceback. ``--dumps DIRECTORY``: the
driver writes which kernel it was as well where steps are captured and overlap; what cuda-gdb reads in it is in the line
where there is a cuda-gdb. Exit status 1 if one of them failed. (`TEMPER_DEVICE_LIMITS=sm80 temper
demo` runs with the GPU's own limits: the demo takes no settings.)
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import StringIO
from pathlib import Path

from rich.console import Console

from benchmarks.lib.environment import environment
from benchmarks.lib.recorder import put_line
from cli.demo.api import Temper
from cli.demo.command import session
from cli.demo.show import Show
from cli.http.client import Client
from cli.settings import CliSettings
from kernels.gpu.launch.device import architectures
from tests.stack import Stack

_READY_SECONDS = 240.0
_TRACEBACK = 6000
"""Characters from the first error in the engine's log on."""
_DUMP = 20_000
"""Characters of what is read in the dumps."""
_GDB_SECONDS = 60.0
_GDB = ("info cuda kernels", "print $errorpc", "info cuda lanes", "x/64i $pc-512", "x/2i $errorpc", "info registers")
# Registers and shared memory, without what makes a dump as large as the device's memory.
_DUMPED = "skip_nonrelocated_elf_images,skip_global_memory,skip_local_memory,skip_constbank_memory"
_BLOCKING = {"CUDA_LAUNCH_BLOCKING": "1", "TEMPER_CUDA_GRAPHS": "0"}


def settings(text: str) -> dict[str, str]:
    """Environment of one Temper: ARCHITECTURE or ARCHITECTURE:NAME=VALUE,NAME=VALUE."""
    limits, _, rest = text.partition(":")
    if limits not in architectures():
        raise argparse.ArgumentTypeError(f"{limits}: not one of {', '.join(architectures())}")
    env = {"TEMPER_DEVICE_LIMITS": limits}
    for part in filter(None, rest.split(",")):
        name, equals, value = part.partition("=")
        if not name or not equals:
            raise argparse.ArgumentTypeError(f"{part}: not NAME=VALUE")
        env[name] = value
    return env


def read(dumps: Path) -> str:
    """What cuda-gdb says of each dump here; empty without one, or without cuda-gdb."""
    gdb = shutil.which("cuda-gdb") or shutil.which("/usr/local/cuda/bin/cuda-gdb")
    text = ""
    for dump in sorted(dumps.iterdir()) if gdb else ():
        command = [str(gdb), "-batch", "-nx", "-ex", f"target cudacore {dump}"]
        for each in _GDB:
            command += ["-ex", each]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_GDB_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            text += f"{dump.name}: cuda-gdb was still at it after {_GDB_SECONDS:.0f} s\n"
        else:
            text += f"{dump.name}:\n{done.stdout}{done.stderr}\n"
    return text[:_DUMP]


def run(
    own: dict[str, str], directory: Path, *, share: float, rounds: int, blocking: bool, dumps: Path | None
) -> dict[str, object]:
    """How one Temper held to an architecture's limits gets through the demo."""
    env = {"TEMPER_MEMORY_FRACTION": f"{share:.3f}", **(_BLOCKING if blocking else {}), **own}
    if dumps is not None:
        env |= {"CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1", "CUDA_COREDUMP_GENERATION_FLAGS": _DUMPED}
        dumps = dumps.resolve() / directory.name
        dumps.mkdir(parents=True, exist_ok=True)
        env["CUDA_COREDUMP_FILE"] = str(dumps / "%p")
    began, error, text = time.monotonic(), "", ""
    stack = Stack(directory, env=env)
    try:
        stack.start(_READY_SECONDS)
        with Client(stack.url, CliSettings()) as client, Temper.connect(client) as temper:
            session(temper, Show(Console(file=StringIO())), rounds=rounds, seed=1)
    except Exception as problem:  # whatever ends the demo is the result
        error = f"{type(problem).__name__}: {problem}"[:500]
        log = stack.log("engine")
        text = log[max(0, log.find("CUDA error") - _TRACEBACK // 2) :][:_TRACEBACK]
    finally:
        stack.stop()
    seconds = round(time.monotonic() - began, 1)
    told = "" if dumps is None else read(dumps)
    return {"settings": own, "blocking": blocking, "seconds": seconds, "error": error, "engine": text, "dumps": told}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("limits", nargs="+", type=settings, metavar="ARCHITECTURE[:NAME=VALUE,...]")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--blocking", action="store_true")
    parser.add_argument("--dumps", type=Path, metavar="DIRECTORY", help="of a dump for each process that fails")
    parser.add_argument("--out", type=Path, help="append each line to this file")
    options = parser.parse_args()
    # Each plans with what is free when it starts, beside those that have taken theirs or will.
    share = 0.9 / len(options.limits)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(len(options.limits)) as pool:
        one = partial(run, share=share, rounds=options.rounds, blocking=options.blocking, dumps=options.dumps)
        places = [Path(scratch, f"{number}-{own['TEMPER_DEVICE_LIMITS']}") for number, own in enumerate(options.limits)]
        failed = False
        for line in pool.map(one, options.limits, places):
            put_line({**line, "beside": len(options.limits) - 1, **environment()}, options.out)
            failed = failed or bool(line["error"])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""Cost of going on with a history by where it lies: `python -m benchmarks.prefix_cache.tier_restore --model
qwen3.5-4b --random`.

Histories of 8,192 random tokens and an answer of 16; then one request at a time with 256 tokens behind one of them,
each history once. Three processes: one with the host's memory and a disk below the device, then, on the same directory,
another such one, and one with the disk alone. One JSON line for each place:

- nowhere: the history itself, which is computed
- device: at once; host: when the device has forgotten everything
- restart: in the second process, which has read the disk into the host's memory when it started
- page cache: in the third process, of the disk's files as the first one left them; first_ms is the first of them
- disk: when the files' pages have been dropped (posix_fadvise), `resident` being what the kernel still has of
  them

`from`: cached tokens by the tier that requests say they came from; where a disk is not well faster than computing, the
engine computes (`--set tier_load_share=3` loads whatever is expected to be faster at all). `--directory` should be on a
disk: a file system in memory has no pages to drop. `benchmarks.prefix_cache.multiturn --workload t` is the same.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.lib.environment import environment
from benchmarks.lib.multiturn_workloads import Session, Sizes, Tokens, Turn, Workload, histories
from benchmarks.lib.random_checkpoint import add_model, check_model, checkpoint
from benchmarks.lib.recorder import put_line
from benchmarks.prefix_cache.traffic import Traffic, report

if TYPE_CHECKING:
    from benchmarks.lib.in_process import InProcessEngine

_EACH = 6
"""Histories for each place."""
_NEW, _OUT = 256, 16
_SETTLE_SECONDS = 180.0
"""Time for the tiers to have done what they were told."""
_SAMPLED = 64
"""Pages of a file that are looked for in memory."""
_PAGE = 4096


def follow_ups(place: str, said: Sequence[Tokens], sizes: Sizes) -> Workload:
    """One request at a time behind each of these histories."""
    fresh = histories(sizes, f"behind {place}", len(said), _NEW)
    sessions = [
        Session((Turn((*before, *turn.turns[0].new), turn.turns[0].out),), shared=len(before) - 1)
        for before, turn in zip(said, fresh.sessions, strict=True)
    ]
    return replace(fresh, sessions=tuple(sessions))


class Stage:
    """One process: an engine, and the results of what is asked of it."""

    def __init__(self, options: argparse.Namespace, tiers: str) -> None:
        from services.pod.preflight import use_kernel_cache

        began = time.perf_counter()
        from benchmarks.lib.in_process import InProcessEngine, only_warnings, settings_for

        only_warnings()
        cuda = options.device != "cpu"
        settings = settings_for(
            checkpoint(options.model, options.scratch),
            options.device,
            tiers=tiers,
            tier_disk_dir=options.directory / "tier",
            **({"max_num_seqs": 16, "state_snapshots": 256, "max_model_len": 16_384} if cuda else {"max_num_seqs": 4}),
            **dict(pair.split("=", 1) for pair in options.set),
        )
        use_kernel_cache(settings)
        self.engine: InProcessEngine = InProcessEngine(settings, prefix_cache=True)
        if self.engine.engine.tiers is None:
            raise RuntimeError("the engine has no tiers")
        self.tiers = self.engine.engine.tiers
        self.options = options
        self.sizes = Sizes(self.engine.vocab_size, options.seed, tokens=1.0 / options.shrink)
        self.start_s = round(time.perf_counter() - began, 2)
        self.files = options.directory / "tier"

    def settle(self) -> None:
        """Waits until the tiers have nothing to do.

        Raises:
            RuntimeError: they still have after a while.
        """
        until = time.monotonic() + _SETTLE_SECONDS
        # A save that ends lets the loop ask for the next one.
        for _ in range(3):
            if not self.tiers.wait_idle(until - time.monotonic()):
                raise RuntimeError(f"the tiers are still busy after {_SETTLE_SECONDS:.0f} s")
            self.engine.engine.loop.call_at_boundary(lambda: None).result()
            time.sleep(0.1)

    def forget(self) -> None:
        """The device does."""
        self.engine.engine.loop.call_at_boundary(lambda: self.engine.pipeline.scheduler.clear_cache()).result()

    def run(self, place: str, workload: Workload, **more: Any) -> list[Tokens]:
        """Sends a workload, prints its result and returns the histories behind it."""
        sent = Traffic(self.engine, workload, f"{place}-{os.getpid()}", marks=False).run()
        found = report(workload, sent)
        times = found["ttft_ms"]
        line = {
            "benchmark": "tier_restore",
            "model": self.options.model,
            "place": place,
            "requests": found["requests"],
            "history_tokens": found["ideal"] // max(1, len(sent)),
            "first_ms": round(1e3 * (sent[0].first - sent[0].at), 2),
            "ttft_ms": times.get("warm", times.get("cold")),
            "cached": found["cached"],
            "ideal": found["ideal"],
            "from": found["from"],
            "start_s": self.start_s,
            "sizes": asdict(self.sizes),
            "settings": self.options.set,
            "tiers": {tier.value: asdict(status) for tier, status in self.tiers.status().items()},
            "layout": asdict(self.tiers.layout),
            **more,
        }
        put_line(line | environment(), self.options.out)
        return [(*each.prompt, *(each.finished.output_ids if each.finished else ())) for each in sent]

    def close(self) -> None:
        self.engine.engine.stop(_SETTLE_SECONDS)


def fill(options: argparse.Namespace) -> None:
    """The first process: computes the histories, and goes on with some of them."""
    stage = Stage(options, "host,disk")
    try:
        sizes, each = stage.sizes, options.each
        warm_up = histories(sizes, "t-warm-up", 2, 8192)
        Traffic(stage.engine, warm_up, "warm-up", marks=False).run()
        base = histories(sizes, "t", 5 * each, 8192)
        said = stage.run("nowhere", base)
        stage.settle()
        stage.run("device", follow_ups("device", said[:each], sizes))
        stage.settle()
        stage.forget()
        stage.run("host", follow_ups("host", said[each : 2 * each], sizes))
        stage.settle()
        (options.directory / "said.json").write_text(json.dumps(said[2 * each :]))
    finally:
        stage.close()


def warm(options: argparse.Namespace) -> None:
    """The second process: goes on with the last of them."""
    stage = Stage(options, "host,disk")
    try:
        stage.settle()
        said = [tuple(tokens) for tokens in json.loads((options.directory / "said.json").read_text())]
        stage.run("restart", follow_ups("restart", said[2 * options.each :], stage.sizes))
        stage.settle()
    finally:
        stage.close()


def restart(options: argparse.Namespace) -> None:
    """The third process: goes on with the others."""
    stage = Stage(options, "disk")
    try:
        stage.settle()
        each, sizes = options.each, stage.sizes
        said = [tuple(tokens) for tokens in json.loads((options.directory / "said.json").read_text())]
        place = "page cache"
        stage.run(place, follow_ups(place, said[:each], sizes), resident=resident(stage.files))
        stage.settle()
        drop(stage.files)
        left = resident(stage.files)
        stage.run("disk", follow_ups("disk", said[each : 2 * each], sizes), resident=left)
    finally:
        stage.close()


def drop(directory: Path) -> None:
    """Takes the pages of all files out of memory, as far as the file system can."""
    os.sync()
    for path in _files(directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def resident(directory: Path) -> float | None:
    """The part of some pages of all files that is in memory; None: the file system does not say."""
    found = total = 0
    for path in _files(directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            pages = path.stat().st_size // _PAGE
            for page in range(0, pages, max(1, pages // _SAMPLED)):
                total += 1
                try:
                    os.preadv(descriptor, [bytearray(1)], page * _PAGE, os.RWF_NOWAIT)
                except BlockingIOError:
                    continue
                found += 1
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP:
                return None
            raise
        finally:
            os.close(descriptor)
    return round(found / total, 3) if total else None


def _files(directory: Path) -> list[Path]:
    return [path for path in sorted(directory.rglob("*")) if path.is_file()]


def run(options: argparse.Namespace, *, shrink: float, each: int = _EACH, directory: Path | None = None) -> None:
    """All processes, one after the other.

    Args:
        options: model, random, scratch, device, set, seed and out, as of the command line.
        directory: on which disk; None: where temporary files are.

    Raises:
        CalledProcessError: one of them failed.
    """
    with tempfile.TemporaryDirectory(dir=directory, prefix="temper-tiers-") as place:
        sys.stderr.write(f"the disk tier is on {_file_system(Path(place))}\n")
        arguments = {
            "model": options.model,
            "scratch": options.scratch,
            "device": options.device,
            "seed": options.seed,
            "shrink": shrink,
            "each": each,
            "directory": place,
        } | ({"out": options.out} if options.out is not None else {})
        command = [
            sys.executable,
            "-m",
            "benchmarks.prefix_cache.tier_restore",
            *(["--random"] if options.random else []),
        ]
        command += [f"--{name}={value}" for name, value in arguments.items()]
        command += [f"--set={pair}" for pair in options.set]
        for stage in ("fill", "warm", "restart"):
            subprocess.run([*command, f"--stage={stage}"], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--shrink", type=float, default=1.0, help="divides lengths")
    parser.add_argument("--each", type=int, default=_EACH, help="histories for each place")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="any other engine setting")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, help="on which disk; none: where temporary files are")
    parser.add_argument("--out", type=Path, help="file to append the results to")
    parser.add_argument("--stage", choices=("fill", "warm", "restart"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    check_model(parser, options)
    if options.stage is None:
        run(options, shrink=options.shrink, each=options.each, directory=options.directory)
    else:
        {"fill": fill, "warm": warm, "restart": restart}[options.stage](options)


def _file_system(directory: Path) -> str:
    """Kind and mount point."""
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    place = next(path for path in (directory, *directory.parents) if path in mounts)
    return f"{mounts[place]} at {place}"


if __name__ == "__main__":
    main()

"""Finds how the products of a decode step are cut up, and which of its kernels start early, inside the step itself.

``python -m benchmarks.tuning.step.tune --out FILE`` on a Hopper GPU. For each number of rows one thing is changed at a
time, against the best so far replayed in turn with it, and kept if it is faster: for each kernel whether it is launched
before the one ahead has ended (programmatic dependent launch), for each matrix the cut. Twice around. What comes out
fills kernels/gpu/linear/skinny_configs.py and the rule in kernels/gpu/launch/programmatic.py.
"""

from __future__ import annotations

import argparse
import faulthandler
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.launches import launches, no_products, one_share
from benchmarks.lib.precompile import Launch, precompile
from benchmarks.lib.random_checkpoint import config_of
from benchmarks.lib.recorder import Clock, Recorder, describe
from benchmarks.tuning.step.cuts import attention_candidates, candidates
from benchmarks.tuning.step.decode_step import MATRICES, DecodeStep, one_of_each
from benchmarks.tuning.step.sweep import Timer, build
from benchmarks.tuning.step.variants import Variant
from kernels.gpu.linear.skinny_configs import SkinnyConfig
from services.engine.models.qwen3_5.config import Qwen3_5Config

_PROCESSES = 16
_WORTH = 0.0015
"""Smaller gains are noise."""


class Tuner:
    """The best step of some rows so far, and what is tried against it."""

    def __init__(
        self, step: DecodeStep, timer: Timer, rows: int, adapters: bool, recorder: Recorder, matrices: Sequence[str]
    ) -> None:
        self._step, self._timer, self._recorder, self._matrices = step, timer, recorder, matrices
        self.best = Variant("everything", rows, adapters, urgency=0)
        self.parts = parts_of(step, self.best)
        self._tried: dict[tuple[Any, ...], float] = {}

    def try_out(self, what: str, **changes: Any) -> float:
        """Microseconds gained; kept as the best if it gains enough."""
        candidate = replace(self.best, what=what, **changes)
        if replace(candidate, what="") == replace(self.best, what=""):
            return 0.0
        try:
            figures = self._timer.try_out(candidate, self.best)
        except Exception as error:  # one that does not run must not end the others
            self._recorder.add({"what": what, **self._place, "failed": describe(error)})
            torch.cuda.synchronize()
            return 0.0
        gain = -float(figures["difference_us"])
        kept = gain > _WORTH * figures["whole_us"] and gain > figures["spread_us"]
        self._recorder.add({"what": what, **self._place, **figures, "kept": kept})
        if kept:
            self._timer.keep(candidate)
            self.best = candidate
        return gain

    @property
    def _place(self) -> dict[str, Any]:
        return {"rows": self.best.rows, "adapters": self.best.adapters}

    def flags(self) -> None:
        self.try_out("all ordinary", ordinary=frozenset(self.parts))
        for count in range(1, 4):
            for some in combinations((part for part in self.parts if part in MATRICES[:-1]), count):
                self.try_out(f"{'+'.join(some)} ordinary", ordinary=frozenset(some))
        for part in self.parts:
            early = part in self.best.ordinary
            changed = self.best.ordinary - {part} if early else self.best.ordinary | {part}
            self.try_out(f"{part} {'early' if early else 'ordinary'}", ordinary=frozenset(changed))
        for part in self.parts:
            if part not in MATRICES:
                self.try_out(f"{part} alone", alone=self.best.alone ^ {part})
        for part in self.parts:
            if " x " in part:
                self.try_out(f"{part} holds or not", held=self.best.held ^ {part})

    def cuts(self, clock: Clock) -> None:
        for name in self._matrices:
            for config in candidates(name, self.best.rows, self._step.kind_of(name)):
                if clock.over:
                    return
                others = tuple(each for each in self.best.cut if each[0] != name)
                text = "torch" if config is None else _text(config)
                self.try_out(f"{name} {text}", cut=(*others, (name, config)))

    def attention(self, clock: Clock) -> None:
        for launched, config in attention_candidates(self.best.rows, self._step):
            if not clock.over:
                self.try_out(f"attention {launched} of {config}", attention=(launched, config))

    def summary(self) -> dict[str, Any]:
        figures = self._timer.try_out(replace(self.best, what="final"), self.best)
        return {
            "what": "best",
            **self._place,
            "us": figures["us"],
            "early": sorted(set(self.parts) - self.best.ordinary),
            "ordinary": sorted(self.best.ordinary),
            "alone": sorted(self.best.alone),
            "held": sorted(self.best.held),
            "attention": None if self.best.attention is None else str(self.best.attention),
            "cuts": {name: None if config is None else asdict(config) for name, config in self.best.cut},
        }


def _text(config: SkinnyConfig) -> str:
    return " ".join(
        map(str, (config.variant, config.block_n, config.block_k, config.warps, config.stages, config.splits))
    )


def parts_of(step: DecodeStep, variant: Variant) -> list[str]:
    """Kernels and matrices whose launches of a step may be early, in their order."""
    found: dict[str, None] = {}

    def note(*launch: Any) -> bool:
        if launch[2].get("launch_pdl"):
            found[step.part(*launch)] = None
        return False

    with launches(note), no_products():
        variant.launch(step)
    return list(found)


def compile_share(options: argparse.Namespace, config: Qwen3_5Config, index: int, device: torch.device) -> None:
    step = build(options, one_of_each(config), device, empty=True)
    with one_share(index, _PROCESSES), no_products():
        for rows in options.rows:
            for adapters in (False, True) if options.adapters else (False,):
                whole = Variant("everything", rows, adapters, urgency=0)
                whole.launch(step)
                kernels = frozenset(parts_of(step, whole)) - set(MATRICES)
                if not options.attention_only:
                    replace(whole, alone=kernels).launch(step)
                    replace(whole, held=kernels).launch(step)
                for attention in attention_candidates(rows, step):
                    replace(whole, attention=attention).launch(step)
                for name in () if options.flags_only or options.attention_only else options.matrices:
                    for cut in candidates(name, rows, step.kind_of(name)):
                        with suppress(Exception):  # reported when it is timed
                            replace(whole, cut=((name, cut),)).launch(step)


@torch.inference_mode()
def tune(step: DecodeStep, options: argparse.Namespace, recorder: Recorder) -> None:
    timer = Timer(step)
    for adapters in (False, True) if options.adapters else (False,):
        for rows in options.rows:
            clock = Clock(options.seconds)
            tuner = Tuner(step, timer, rows, adapters, recorder, options.matrices)
            first = timer.time(replace(tuner.best))
            recorder.add({"what": "everything", "rows": rows, "adapters": adapters, **first})
            tuner.attention(clock)
            if not options.cuts_only and not options.attention_only:
                tuner.flags()
            for _ in range(0 if options.flags_only or options.attention_only else 1 + (not options.cuts_only)):
                tuner.cuts(clock)
                if not options.cuts_only:
                    tuner.flags()
            summary = tuner.summary()
            recorder.add(summary)
            print(f"{rows} rows{', adapters' * adapters}: {first['us']:.0f} to {summary['us']:.0f} us")
            print("   early:", *summary["early"], "| ordinary:", *summary["ordinary"], "| alone:", *summary["alone"])
            for name, cut in tuner.best.cut:
                print(f"   {name}: {'torch' if cut is None else _text(cut)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 8, 16, 32, 64]
    )
    parser.add_argument("--adapters", type=int, default=0, metavar="N", help="also with row i using adapter i mod N")
    parser.add_argument("--quant", choices=("none", "fp8", "int4"), default="none")
    parser.add_argument("--kv", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--state", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--context", type=int, default=600, help="tokens of each sequence")
    parser.add_argument(
        "--matrices", type=lambda text: text.split(","), default=list(MATRICES), help="whose cuts are tried"
    )
    parser.add_argument("--flags-only", action="store_true", help="leave the cuts as they are")
    parser.add_argument("--attention-only", action="store_true", help="leave cuts of products and launches as they are")
    parser.add_argument("--cuts-only", action="store_true", help="leave the launches as they are")
    parser.add_argument("--seconds", type=float, default=30.0, help="most time for the cuts of one number of rows")
    parser.add_argument("--shape", default="qwen3.5-4b")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    config = Qwen3_5Config.from_dict(config_of(options.shape))
    shares: list[Launch] = [partial(compile_share, options, config, index) for index in range(_PROCESSES)]
    print(f"compiled in {precompile(shares):.0f} s", flush=True)
    # A step that hangs would take all of the time of whoever waits for it.
    faulthandler.dump_traceback_later(120 + 60 * len(options.rows), exit=True)
    tune(build(options, config, torch.device("cuda"), empty=False), options, Recorder(options.out))


if __name__ == "__main__":
    main()

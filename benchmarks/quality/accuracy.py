"""Logits of the fused bf16 forward against a float32 run of transformers, beside transformers' own bf16 error.

``python -m benchmarks.quality.accuracy [--shape qwen3.5-4b] [--layers N]`` on a GPU. The prompts have the lengths at
which chunked forms have gone wrong (REFERENCE: 1, 31, 32, 33, 63, 64, 65, 127, 128, 129), and a longer one; each is
computed whole, in uneven pieces, and with its last tokens as decodes. The bar: an error of at most 1.1 times
transformers' own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.random_checkpoint import config_of, write
from benchmarks.lib.recorder import Clock, Recorder, describe
from services.engine.models.footprint import Quantization

_LENGTHS = (1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1024)
_PIECES = (33, 31, 1, 63, 64, 65, 127)
"""Lengths of the pieces of a prompt that is computed in pieces, again and again."""
_DECODES = 16
_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Way:
    """Cut of a prompt: lengths of prefill pieces, and how many tokens at its end are decodes."""

    name: str
    pieces: tuple[int, ...]
    decodes: int

    @classmethod
    def all(cls, length: int) -> list[Way]:
        ways = [cls("whole", (length,), 0)]
        cut: list[int] = []
        while sum(cut) < length:
            cut.append(min(_PIECES[len(cut) % len(_PIECES)], length - sum(cut)))
        if len(cut) > 1:
            ways.append(cls("pieces", tuple(cut), 0))
        if length > _DECODES:
            ways.append(cls("decodes", (length - _DECODES,), _DECODES))
        return ways


class Fused:
    """The CUDA forward without scheduler and runner: one sequence in slot 1."""

    def __init__(self, directory: Path, quantization: Quantization, device: torch.device) -> None:
        from kernels.gpu.attention.decode import DecodeWorkspace, decode_splits
        from kernels.gpu.launch.device import limits_of
        from services.engine.models.device_batch import DecodeAttention, DeviceCache
        from services.engine.models.footprint import Storage
        from services.engine.models.lora.slots import LoraSlots
        from services.engine.models.qwen3_5.fused import FusedForward
        from services.engine.models.qwen3_5.model import Qwen3_5

        storage = Storage() if quantization == "none" else Storage(quantization, float8_head=True)
        model = Qwen3_5.from_directory(directory, dtype=torch.bfloat16, device=device, storage=storage)
        config = model.config
        blocks = -(-max(_LENGTHS) // _BLOCK)
        cache = DeviceCache.allocate(
            config, torch.bfloat16, device, num_blocks=blocks + 1, block_size=_BLOCK, num_slots=2
        )
        tables = torch.zeros(2, blocks, dtype=torch.int32, device=device)
        tables[1] = torch.arange(1, blocks + 1, dtype=torch.int32)
        splits = decode_splits(1, config.num_kv_heads, limits_of(device))
        self._attention = DecodeAttention(
            splits,
            DecodeWorkspace.allocate(1, config.num_heads, config.num_kv_heads, splits, config.head_dim, device),
        )
        self._device = device
        self._forward = FusedForward(
            config,
            model.weights,
            model.rotation,
            cache,
            LoraSlots(config, 2, 16, torch.bfloat16, device),
            tables=tables,
            last_tokens=torch.zeros(2, dtype=torch.int32, device=device),
        )

    @torch.inference_mode()
    def logits(self, tokens: Tensor, way: Way) -> Tensor:
        """[T] token ids to [T, vocab] float32."""
        from kernels.gpu.segments import Segments
        from services.engine.models.device_batch import StepRows

        parts: list[Tensor] = []
        begin = 0
        for length in (*way.pieces, *[1] * way.decodes):
            decode = begin >= sum(way.pieces)
            rows = StepRows(
                tokens=tokens[begin : begin + length].to(torch.int32),
                positions=torch.arange(begin, begin + length, dtype=torch.int32, device=self._device),
                slots=torch.ones(length, dtype=torch.int32, device=self._device),
                adapters=torch.zeros(length, dtype=torch.int32, device=self._device),
                active_adapters=torch.zeros(2, dtype=torch.int32, device=self._device),
                decodes=1 if decode else 0,
                segments=None if decode else Segments.build([length], [begin], [1], [0], self._device),
            )
            x = self._forward.layers(rows, self._attention, adapters=False)
            parts += [self._forward.logits(piece).float() for piece in torch.split(x, 64)]
            begin += length
        return torch.cat(parts)


@torch.inference_mode()
def reference_logits(
    directory: Path, dtype: torch.dtype, prompts: Sequence[Tensor], device: torch.device
) -> list[Tensor]:
    """Logits [T, vocab] of transformers on the device, returned on the CPU as float32."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    model.to(device).eval()
    return [model(prompt[None]).logits[0].float().cpu() for prompt in prompts]


def error(ours: Tensor, expected: Tensor) -> float:
    """Relative error in the Frobenius norm; NaN if anything is."""
    wanted = expected.to(ours.device).double()
    return float((ours.double() - wanted).norm() / wanted.norm())


def measure(
    directory: Path, quantization: Sequence[Quantization], device: torch.device, recorder: Recorder, clock: Clock
) -> None:
    """Records a row for each prompt, way and quantization."""
    torch.backends.cuda.matmul.allow_tf32 = False
    generator = torch.Generator().manual_seed(1)
    vocabulary = json.loads((directory / "config.json").read_text())["vocab_size"]
    prompts = [torch.randint(0, vocabulary, (length,), generator=generator).to(device) for length in _LENGTHS]
    expected = reference_logits(directory, torch.float32, prompts, device)
    torch.cuda.empty_cache()
    half = reference_logits(directory, torch.bfloat16, prompts, device)
    torch.cuda.empty_cache()
    own = [error(a.to(device), b) for a, b in zip(half, expected, strict=True)]
    for kind in quantization:
        fused = Fused(directory, kind, device)
        for prompt, wanted, theirs in zip(prompts, expected, own, strict=True):
            for way in Way.all(len(prompt)):
                row: dict[str, Any] = {"quantization": kind, "tokens": len(prompt), "way": way.name}
                if clock.over:
                    print("out of time")
                    return
                try:
                    ours = error(fused.logits(prompt, way), wanted)
                    row |= {"error": ours, "transformers_bf16_error": theirs, "ratio": ours / theirs}
                except Exception as failure:  # the other ways' figures are still wanted
                    row["failed"] = describe(failure)
                recorder.add(row)
        del fused
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3.5-4b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--quantization", nargs="+", default=["none"], choices=("none", "fp8", "int4"))
    parser.add_argument("--seconds", type=float, default=240.0, help="start no prompt after this")
    parser.add_argument("--out", type=Path, help="file for the rows as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as scratch:
        directory = Path(scratch)
        write(directory, config_of(options.shape, options.layers), gentle=True)
        clock, recorder = Clock(options.seconds), Recorder(options.out)
        measure(directory, options.quantization, torch.device("cuda"), recorder, clock)
    rows = [row for row in recorder.rows if "failed" not in row]
    print(*(row for row in recorder.rows if "failed" in row), sep="\n")
    for row in rows:
        print(
            f"{row['quantization']:<5} {row['tokens']:>5} tokens {row['way']:<8} error {row['error']:.3e}  "
            f"transformers bf16 {row['transformers_bf16_error']:.3e}  ratio {row['ratio']:.3f}"
        )
    for kind in options.quantization:
        ratios = [row["ratio"] for row in rows if row["quantization"] == kind]
        print(f"{kind}: worst ratio of {len(ratios)}: {max(ratios, default=float('nan')):.3f}")


if __name__ == "__main__":
    main()

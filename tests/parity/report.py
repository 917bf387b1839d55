"""Prints the parity table: `python -m tests.parity.report`.

Largest absolute difference of logits (float32, CPU) from transformers in float64 for every random configuration, prompt
length and chunk size, and the largest relative error of a LoRA gradient from transformers and PEFT.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import transformers

from services.engine.models.lora.binding import bind_adapter
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.qwen3_5.model import Qwen3_5
from tests.parity.adapters import adapter_files, make_adapter
from tests.parity.reference import BAR, CHUNKS, CONFIGS, LENGTHS, Driver, make_checkpoint, prompt, reference_logits
from tests.parity.test_gradients import DOCUMENTS, LEVELS, gradients, grpo, our_logprobs, sft, their_logprobs


def logit_rows(name: str, path: Path) -> list[list[str]]:
    """One row a prompt length: the difference for each chunk size."""
    reference = make_checkpoint(name, path)
    driver = Driver(Qwen3_5.from_directory(path, dtype="float32", device="cpu"))
    rows = []
    for length in LENGTHS:
        tokens = prompt(length)
        expected = reference_logits(reference, tokens)
        cells = [name, str(length)]
        for chunk in CHUNKS:
            place, logits = driver.prefill(tokens, chunk)
            driver.close(place)
            cells.append(f"{float((logits - expected).abs().max()):.1e}")
        rows.append(cells)
    return rows


def gradient_rows(name: str, path: Path) -> list[list[str]]:
    """One row a loss: the worst tensor at each level of recomputation."""
    model = Qwen3_5.from_directory(path, dtype="float32", device="cpu")
    peft = make_adapter(path, path / "adapter", r=3)
    lora = LoraParams.from_bound(bind_adapter(adapter_files(path / "adapter"), model.config, max_rank=8))
    with torch.no_grad(), peft.disable_adapter():
        base = their_logprobs(peft, DOCUMENTS)
    rows = []
    for loss in (sft, grpo):
        peft.zero_grad()
        loss(their_logprobs(peft, DOCUMENTS), base).backward()
        theirs = {
            key.removeprefix("base_model.model.model.").removesuffix(".default.weight"): parameter.grad
            for key, parameter in peft.named_parameters()
            if parameter.grad is not None
        }
        cells = [name, loss.__name__]
        for recompute in LEVELS:
            loss(our_logprobs(model, lora, DOCUMENTS, recompute=recompute), base).backward()
            ours = gradients(lora)
            worst = max(float((ours[key] - theirs[key]).norm() / theirs[key].norm()) for key in ours)
            cells.append(f"{worst:.1e}")
        rows.append([*cells, str(len(theirs))])
    return rows


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table with aligned columns."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    head = "| " + " | ".join(cell.rjust(width) for cell, width in zip(header, widths, strict=True)) + " |"
    return "\n".join([head, "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|", *lines])


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None).parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logits: list[list[str]] = []
    grads: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in CONFIGS:
            path = Path(folder) / name
            path.mkdir()
            logits += logit_rows(name, path)
            grads += gradient_rows(name, path)
    chunks = [f"chunk {chunk or 'all'}" for chunk in CHUNKS]
    sys.stdout.write(
        f"Logits, max abs difference from transformers {transformers.__version__} in float64 (bar {BAR:.0e})\n\n"
        + table(["configuration", "tokens", *chunks], logits)
        + "\n\nLoRA gradients, largest relative error of a tensor (bar 1e-04)\n\n"
        + table(["configuration", "loss", "plain", "checkpointed", "tensors"], grads)
        + "\n"
    )


if __name__ == "__main__":
    main()

"""Trains the mtp layer: `python -m models.tiny.recipe.train_mtp [--out DIR] [--minutes 1]`, on a GPU or a CPU.

The layer drafts the token after next, for speculative decoding. The model is frozen and is the teacher: the loss is
the cross entropy of the draft token to the model's own distribution one token later, over the replies, because what
counts is how often the draft token is the token that the model will choose. Names and order of the tensors are those of
Qwen's checkpoints (see vLLM's qwen3_next_mtp): fc over [norm(embedding of token t + 1), norm(normed hidden state t)],
one full-attention layer, norm, the model's head.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3_5ForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5

from models.tiny.recipe.batches import IGNORE, Batch, ahead, batches
from models.tiny.recipe.data import DIRECTORY
from models.tiny.recipe.train import gated_delta_rule, optimizers

FILE = "model-mtp.safetensors"


class Mtp(nn.Module):
    """The layer as transformers would build it; transformers itself leaves it out."""

    def __init__(self, model: Qwen3_5ForCausalLM) -> None:
        super().__init__()
        config = copy.deepcopy(model.config)
        config.layer_types = ["full_attention"]
        hidden, eps = config.hidden_size, config.rms_norm_eps
        norm = modeling_qwen3_5.Qwen3_5RMSNorm
        self.pre_fc_norm_embedding = norm(hidden, eps=eps)
        self.pre_fc_norm_hidden = norm(hidden, eps=eps)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([modeling_qwen3_5.Qwen3_5DecoderLayer(config, 0)])
        self.norm = norm(hidden, eps=eps)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        # Starts from what the model says of the next token, not from noise.
        self.fc.weight.data[:, hidden:] += torch.eye(hidden)
        self.norm.weight.data.copy_(model.model.norm.weight)

    def forward(self, embedded: Tensor, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """[B, T, hidden] embeddings of tokens t + 1 and normed hidden states t to normed hidden states."""
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], dim=-1))
        # Without a mask, and with its implementation "sdpa", the layer is causal.
        out = self.layers[0](x, position_embeddings=rotation, attention_mask=None)
        return self.norm(out[0] if isinstance(out, tuple) else out)


@dataclass(frozen=True, slots=True)
class Lesson:
    """One bucket of a batch with what the frozen model makes of it."""

    tokens: Tensor
    """[B, T]."""
    chosen: Tensor
    """[B, T - 1] bool: where the token after next is part of a reply."""
    hidden: Tensor
    """[B, T, hidden], normed."""
    count: int

    @classmethod
    @torch.no_grad()
    def of(cls, model: Qwen3_5ForCausalLM, batch: Batch) -> Lesson:
        tokens, labels = (torch.from_numpy(x).to(model.device) for x in (batch.tokens, batch.labels))
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
        chosen = labels[:, 1:] != IGNORE
        return cls(tokens, chosen, hidden, int(chosen.sum()))


def lesson_loss(model: Qwen3_5ForCausalLM, layer: Mtp, lesson: Lesson) -> tuple[Tensor, Tensor]:
    """Sum of the cross entropies to the model's own distribution, and how many draft tokens hit its first choice."""
    with torch.no_grad():
        teacher = model.lm_head(lesson.hidden[:, 1:][lesson.chosen]).float()
        positions = torch.arange(lesson.tokens.shape[1] - 1, device=model.device)[None]
        rotation = model.model.rotary_emb(lesson.hidden, positions)
        embedded = model.model.embed_tokens(lesson.tokens[:, 1:])
    draft = model.lm_head(layer(embedded, lesson.hidden[:, :-1], rotation)[lesson.chosen]).float()
    loss = functional.cross_entropy(draft, teacher.softmax(-1), reduction="sum")
    return loss, (draft.argmax(-1) == teacher.argmax(-1)).sum()


def save(layer: Mtp, out: Path) -> None:
    """Writes the tensors beside the model's own, in bf16."""
    tensors = {f"mtp.{name}": value.detach().to(torch.bfloat16).cpu() for name, value in layer.state_dict().items()}
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / FILE, metadata={"format": "pt"})


def main() -> None:
    """Trains, writes the file and prints a line of progress now and then."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DIRECTORY)
    parser.add_argument("--out", type=Path, default=DIRECTORY)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=0, help="a step, padding included; 0: 65536 on a GPU, else 3072")
    parser.add_argument("--batches", type=int, default=0, help="go through so many again and again; 0: fresh ones")
    parser.add_argument("--muon", type=float, default=4e-3)
    parser.add_argument("--adam", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0, help="that make data; 0: 12 for a GPU, else 1")
    options = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(options.seed)
    modeling_qwen3_5.torch_chunk_gated_delta_rule = gated_delta_rule
    model = (
        Qwen3_5ForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(device).eval().requires_grad_(False)
    )
    for module in model.modules():
        if hasattr(module, "chunk_gated_delta_rule"):
            module.chunk_gated_delta_rule = gated_delta_rule
    layer = Mtp(model).to(device).train()
    steppers = optimizers(layer, options.muon, options.adam)
    rates = [group["lr"] for stepper in steppers for group in stepper.param_groups]
    size = options.tokens or (65536 if device.type == "cuda" else 3072)
    workers = options.workers or (12 if device.type == "cuda" else 1)
    source = ahead(batches(options.seed, tokens_per_batch=size, workers=workers))
    next(source)  # the clock starts when there is data

    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")
    kept: list[list[Lesson]] = []
    begin = time.monotonic()
    shown, step = 0.0, 0
    while (done := (time.monotonic() - begin) / (60 * options.minutes)) < 1:
        if options.batches and len(kept) == options.batches:
            lessons = kept[step % options.batches]
        else:
            with autocast:
                lessons = [Lesson.of(model, batch) for batch in next(source)]
            if options.batches:
                kept.append(lessons)
        scale = min(1.0, (step + 1) / 20) * (1 - done)
        for group, rate in zip((g for s in steppers for g in s.param_groups), rates, strict=True):
            group["lr"] = rate * scale
        total = sum(lesson.count for lesson in lessons)
        sums = torch.zeros(2, device=device)
        for lesson in lessons:
            with autocast:
                loss, hits = lesson_loss(model, layer, lesson)
            (loss / total).backward()
            sums += torch.stack([loss.detach(), hits.float()]) / total
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
        step += 1
        elapsed = time.monotonic() - begin
        if elapsed - shown > 10 or step == 1:
            shown = elapsed
            mean, share = sums.tolist()
            line = {"step": step, "seconds": round(elapsed, 1), "loss": round(mean, 4), "hits": round(share, 4)}
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
    save(layer, options.out)


if __name__ == "__main__":
    main()

"""Trains the model: `python -m models.tiny.recipe.train --out DIR [--minutes 7]`, on one GPU (a CPU works, slowly).

bf16 autocast over float32 weights; Muon for the hidden matrices, AdamW for the rest; the learning rate falls linearly
to zero with the time that is used up. The released weights are the bf16 rounding of the last step.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from models.tiny.recipe.batches import IGNORE, Batch, ahead, batches
from models.tiny.recipe.data import DIRECTORY

CHUNK = 32
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' chunked rule for training (no state in or out), as batched products that compile well.

    query, key [B, T, Hk, D], value [B, T, Hv, Dv], g and beta [B, T, Hv]. The inverse of the unit lower triangular
    system is the product of (I + X^(2^i)) with X its negated strictly lower part: exact, since X is nilpotent.
    """
    dtype, length, groups = value.dtype, value.shape[1], value.shape[2] // key.shape[2]
    query, key, value, g, beta = (x.transpose(1, 2).float() for x in (query, key, value, g, beta))
    query = functional.normalize(query, dim=-1, eps=1e-6) * query.shape[-1] ** -0.5
    key = functional.normalize(key, dim=-1, eps=1e-6)
    query, key = (x.repeat_interleave(groups, dim=1) for x in (query, key))
    q, k, v = (x.unflatten(2, (-1, CHUNK)) for x in (query, key, value))
    g, beta = (x.unflatten(2, (-1, CHUNK)) for x in (g, beta))
    total = g.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -math.inf).exp()
    k_beta = k * beta[..., None]
    power = -(k_beta @ k.mT * decay).tril(-1)
    inverse = power + torch.eye(CHUNK, device=q.device)
    for _ in range(int(math.log2(CHUNK)) - 1):
        power = power @ power
        inverse = inverse + inverse @ power
    new = inverse @ (v * beta[..., None])
    read = inverse @ (k_beta * total.exp()[..., None])
    within = q @ k.mT * decay
    q = q * total.exp()[..., None]
    k = k * (total[..., -1:] - total).exp()[..., None]
    state = torch.zeros(*v.shape[:2], k.shape[-1], v.shape[-1], device=q.device)
    out = []
    for i in range(v.shape[2]):
        fresh = new[:, :, i] - read[:, :, i] @ state
        out.append(q[:, :, i] @ state + within[:, :, i] @ fresh)
        state = state * total[:, :, i, -1].exp()[..., None, None] + k[:, :, i].mT @ fresh
    return torch.stack(out, dim=2).flatten(2, 3)[:, :, :length].transpose(1, 2).to(dtype), None


def new_model(seed: int) -> Qwen3_5ForCausalLM:
    """The committed configuration with random float32 weights."""
    torch.manual_seed(seed)
    config = Qwen3_5TextConfig.from_pretrained(DIRECTORY)
    config.dtype = "float32"
    model = Qwen3_5ForCausalLM(config)
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            # Memory of a few to a few hundred tokens per head, rather than the default that forgets at once.
            heads = layer.linear_attn.num_v_heads
            layer.linear_attn.A_log.data.copy_(torch.linspace(math.log(0.02), math.log(1.0), heads))
            layer.linear_attn.dt_bias.data.fill_(math.log(math.expm1(0.1)))
    return model


def batch_loss(model: Qwen3_5ForCausalLM, tokens: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross entropy over the labelled positions."""
    logits = model(input_ids=tokens, use_cache=False).logits
    return functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), reduction="sum", ignore_index=IGNORE
    )


class Step:
    """Forward and backward of one bucket's fixed shape, adding to the gradients; a CUDA graph where there is a GPU.

    The model is so small that launching its kernels one by one would take several times as long as running them.
    """

    def __init__(self, model: Qwen3_5ForCausalLM, batch: Batch, device: torch.device) -> None:
        self._model, self._device = model, device
        self._tokens = torch.from_numpy(batch.tokens).to(device)
        self._labels = torch.from_numpy(batch.labels).to(device)
        self._scale = torch.ones((), device=device)
        self._loss = torch.zeros((), device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type != "cuda":
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._compute()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._compute()

    def _compute(self) -> None:
        with torch.autocast(self._device.type, dtype=torch.bfloat16, cache_enabled=False):
            loss = batch_loss(self._model, self._tokens, self._labels) * self._scale
        loss.backward()
        self._loss.copy_(loss.detach())

    def __call__(self, batch: Batch, count: int) -> Tensor:
        """Adds the gradients of the batch's share of a mean over ``count`` labels; returns that share of the loss."""
        self._tokens.copy_(torch.from_numpy(batch.tokens))
        self._labels.copy_(torch.from_numpy(batch.labels))
        self._scale.fill_(1 / count)
        if self._graph is None:
            self._compute()
        else:
            self._graph.replay()
        return self._loss


def save(model: Qwen3_5ForCausalLM, out: Path) -> None:
    """Writes the bf16 checkpoint and the files beside it."""
    state = {name: value.detach().to(torch.bfloat16).cpu() for name, value in model.state_dict().items()}
    copy = Qwen3_5ForCausalLM(Qwen3_5TextConfig.from_pretrained(DIRECTORY)).to(torch.bfloat16)
    copy.load_state_dict(state)
    copy.save_pretrained(out)
    for name in FILES:
        if (DIRECTORY / name).resolve() != (out / name).resolve():
            shutil.copyfile(DIRECTORY / name, out / name)


def optimizers(model: Qwen3_5ForCausalLM, muon_rate: float, adam_rate: float) -> list[torch.optim.Optimizer]:
    """Muon where an orthogonal update makes sense, AdamW for embeddings, gains, gates and the convolution."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        small = parameter.ndim != 2 or "embed" in name or "in_proj_a" in name or "in_proj_b" in name
        (others if small else matrices).append(parameter)
    adam: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, adam_rate, betas=(0.9, 0.98), weight_decay=0.0)]
    if muon_rate <= 0:
        return [torch.optim.AdamW([*others, *matrices], adam_rate, betas=(0.9, 0.98), weight_decay=0.01)]
    muon = torch.optim.Muon(matrices, lr=muon_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return [muon, *adam]


def main() -> None:
    """Trains, writes the checkpoint and prints a line of progress now and then."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument("--tokens", type=int, default=65536, help="tokens a step, padding included")
    parser.add_argument("--muon", type=float, default=4e-3, help="learning rate of Muon; 0: AdamW for everything")
    parser.add_argument("--adam", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--save-every", type=float, default=1e9, help="seconds between intermediate checkpoints")
    options = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    modeling_qwen3_5.torch_chunk_gated_delta_rule = gated_delta_rule
    model = new_model(options.seed).to(device).train()
    for module in model.modules():
        if hasattr(module, "chunk_gated_delta_rule"):  # releases that bind the function at construction
            module.chunk_gated_delta_rule = gated_delta_rule
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    steppers = optimizers(model, options.muon, options.adam)
    rates = [group["lr"] for stepper in steppers for group in stepper.param_groups]
    source = ahead(batches(options.seed, tokens_per_batch=options.tokens, workers=options.workers))
    compute = [Step(model, batch, device) for batch in next(source)]
    for stepper in steppers:
        stepper.zero_grad(set_to_none=False)

    begin = time.monotonic()
    shown = saved = 0.0
    step = seen = 0
    history: list[dict[str, float]] = []
    while (done := (time.monotonic() - begin) / (60 * options.minutes)) < 1:
        parts = next(source)
        scale = min(1.0, (step + 1) / 100) * (1 - done)
        for group, rate in zip((g for s in steppers for g in s.param_groups), rates, strict=True):
            group["lr"] = rate * scale
        count = sum(int((part.labels != IGNORE).sum()) for part in parts)
        losses = [run(part, count) for run, part in zip(compute, parts, strict=True)]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad(set_to_none=False)
        step, seen = step + 1, seen + sum(part.tokens.size for part in parts)
        elapsed = time.monotonic() - begin
        if elapsed - shown > 10 or step == 1:
            shown = elapsed
            line = {"step": step, "seconds": round(elapsed, 1), "tokens": seen, "loss": round(float(sum(losses)), 4)}
            history.append(line)
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
        if elapsed - saved > options.save_every:
            saved = elapsed
            save(model, options.out)
    save(model, options.out)
    (options.out / "history.json").write_text(json.dumps(history), encoding="utf-8")


if __name__ == "__main__":
    main()

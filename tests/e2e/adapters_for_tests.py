"""PEFT adapters made by PEFT itself, and an independent greedy reference for the answers they give."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save
from transformers import Qwen3_5ForCausalLM

TARGETS = [
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "in_proj_qkv",
    "in_proj_z",
    "out_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
]


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The two files that an upload sends."""

    weights: bytes
    config: bytes


class Reference:
    """transformers + PEFT with one adapter whose weights are exchanged in place."""

    def __init__(self, model_dir: Path, *, rank: int = 4) -> None:
        base = Qwen3_5ForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS, task_type="CAUSAL_LM", bias="none")
        self.model: PeftModel = get_peft_model(base, config).eval()
        self.config = {
            **config.to_dict(),
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "target_modules": TARGETS,
            "base_model_name_or_path": "tiny",
        }

    def _lora(self) -> dict[str, torch.nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if ".lora_" in name}

    def randomize(self, seed: int, *, scale: float) -> AdapterFiles:
        """Gives every LoRA tensor seeded normal values of the given scale and returns the PEFT files."""
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        with torch.no_grad():
            for name, parameter in self._lora().items():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
                tensors[name.replace(".default", "")] = parameter.detach().clone()
        config = {key: sorted(v) if isinstance(v, set) else v for key, v in self.config.items()}
        return AdapterFiles(save(tensors), json.dumps(config, default=str).encode())

    @torch.inference_mode()
    def greedy_gap(self, prompt: Sequence[int], answer: Sequence[int]) -> float:
        """How far the chosen tokens are below the best ones, at worst: 0 when every token is the argmax."""
        ids = torch.tensor([[*prompt, *answer]])
        logits = self.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        return float((logits.max(dim=1).values - chosen).max())

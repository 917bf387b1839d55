"""Random PEFT adapters on the reference model, and the same on ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from services.engine.models.lora.targets import TARGET_MODULES


def make_adapter(checkpoint: Path, out: Path, *, seed: int = 0, **settings: Any) -> PeftModel:
    """A PEFT model over a fresh load of the checkpoint, with an adapter whose B is not zero; saved to ``out``."""
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    options = {"r": 4, "lora_alpha": 8, "target_modules": list(TARGET_MODULES), "lora_dropout": 0.0} | settings
    peft = get_peft_model(base, LoraConfig(**options))
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    peft.save_pretrained(out)
    return peft


def adapter_files(path: Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in ("adapter_model.safetensors", "adapter_config.json")}


def text_config(checkpoint: Path) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig.from_pretrained(checkpoint)

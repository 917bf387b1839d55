"""Workloads of benchmarks.training.opd in TRL's GKDTrainer. Needs trl (with trl.experimental.gkd), datasets
and peft, which are no dependencies of this project."""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.training.opd.workloads import MODULES, RANK, Workload

_NEEDED = ("trl", "datasets", "peft", "transformers")


def check_importable() -> None:
    """Raises SystemExit that says what is missing."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(f"--trl needs {', '.join(missing)}: pip install trl peft datasets, or leave --trl out")


def measure_trl(
    student: Path, teacher: Path, device: str, workload: Workload, steps: int, warm_up: int
) -> dict[str, Any]:
    """One workload: a fresh student with LoRA on q and v, bfloat16 on a GPU; wall time from step to step."""
    import datasets
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    class Clock(TrainerCallback):
        """Clock that notes when each step begins and ends."""

        def __init__(self) -> None:
            self.seconds: list[float] = []
            self._began = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if len(self.seconds) == warm_up and device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            self._began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if device == "cuda":
                torch.cuda.synchronize()
            self.seconds.append(time.perf_counter() - self._began)

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    load: Any = AutoModelForCausalLM.from_pretrained
    models = [load(path, dtype=dtype).to(device) for path in (student, teacher)]
    tokenizer = AutoTokenizer.from_pretrained(student)
    prompts = workload.make_prompts(min(len(tokenizer), models[0].config.vocab_size))
    clock = Clock()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = GKDTrainer(
            model=models[0],
            teacher_model=models[1],
            args=GKDConfig(
                output_dir=scratch,
                per_device_train_batch_size=workload.per_step,
                max_steps=steps + warm_up,
                lmbda=1.0,
                beta=0.0,
                temperature=workload.sampling_temperature or 1.0,
                max_new_tokens=workload.new_tokens,
                learning_rate=1e-4,
                lr_scheduler_type="constant",
                bf16=device == "cuda",
                use_cpu=device == "cpu",
                gradient_checkpointing=False,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
            ),
            data_collator=_collate,
            train_dataset=datasets.Dataset.from_dict({"prompt_ids": [list(prompt) for prompt in prompts]}),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=MODULES, task_type="CAUSAL_LM"),
            callbacks=[clock],
        )
        if workload.sampling_temperature == 0:
            trainer.generation_config.do_sample = False
            trainer.generation_config.temperature = None
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    measured = clock.seconds[warm_up:]
    return {
        "workload": workload.name,
        "by": "trl",
        "step_seconds": round(statistics.median(measured), 4),
        "slowest_seconds": round(max(measured), 4),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if device == "cuda" else None,
        "loss": [round(loss, 4) for loss in (losses[warm_up], losses[-1])],
        "steps": len(measured),
    }


def _collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Prompts of one length as they are, shorter ones padded on the left; the trainer samples what follows."""
    longest = max(len(row["prompt_ids"]) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        prompt = torch.tensor(row["prompt_ids"])
        ids[index, longest - len(prompt) :] = prompt
        mask[index, longest - len(prompt) :] = 1
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": torch.full_like(ids, -100),
        "prompts": ids,
        "prompt_attention_mask": mask,
    }

"""Every LoRA gradient of an SFT step equals a plain transformers + PEFT backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from services.common.jobs import SftJob
from services.trainer.jobs.sft import SftRun
from tests.tokenizer_support import qwen_like_tokenizer
from tests.training_support import (
    TrainingHost,
    assert_same_gradients,
    gradients,
    peft_reference,
    random_adapter,
    reference_logprobs,
    write_checkpoint,
)

# float32 itself is good for 1e-5 at this scale of weights; three times larger ones cost it another digit.
SCALE = {"initializer_range": 0.1}
SHAPES: dict[str, dict[str, Any]] = {
    "default": {},
    "one kv head, untied": {"num_key_value_heads": 1, "tie_word_embeddings": False},
    "odd heads": {
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
    },
}
# Lengths around the chunk size of the gated delta rule (64) and several documents in one microbatch.
EXAMPLES = [
    {"prompt": "What is 2 + 2?", "completion": "4"},
    {"prompt": "Say it again. " * 5, "completion": "The answer is 46. " * 6},
    {"prompt": "Reverse the string 'temper'.", "completion": "repmet"},
    {"prompt": "x", "completion": "You are a helpful assistant. " * 8},
]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("limit", [220, 1024], ids=["accumulated", "packed"])
def test_sft_gradients(tmp_path: Path, shape: dict[str, Any], checkpointing: bool, limit: int) -> None:
    torch.set_num_threads(1)
    directory = write_checkpoint(tmp_path, qwen_like_tokenizer(), **SCALE, **shape)
    host = TrainingHost(directory, max_train_tokens=1024)
    adapter = random_adapter(host)
    spec = SftJob.model_validate(
        {
            "adapter": "a",
            "examples": EXAMPLES,
            "batch_size": 4,
            "gradient_checkpointing": checkpointing,
            "max_tokens_per_microbatch": limit,
        }
    )
    run = SftRun.prepare(spec, host, adapter)
    metrics, _ = run._accumulate(0, lambda: None)

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"),
        chat_template=(directory / "chat_template.jinja").read_text(),
    )
    model = peft_reference(directory, adapter, tmp_path / "adapter")
    parts = []
    for example in EXAMPLES:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": example["prompt"]}], add_generation_prompt=True, return_dict=False
        )
        completion = tokenizer.encode(example["completion"] + "<|im_end|>", add_special_tokens=False)
        parts.append(reference_logprobs(model, prompt + completion, len(prompt)))
    loss = -torch.cat(parts).mean()
    loss.backward()
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert_same_gradients(gradients(run.lora), model)

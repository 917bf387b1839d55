"""TRL's own clients of vLLM: of GRPO's server mode and of distillation, and rollouts of its asynchronous GRPO. Prints a
JSON object of what each returned. torch and accelerate are those of the environment whose packages are named."""

import asyncio
import json
import sys
from types import SimpleNamespace

url, packages, adapter = sys.argv[1:]
sys.path.append(packages)

import aiohttp  # noqa: E402
from accelerate import PartialState  # noqa: E402
from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop  # noqa: E402
from trl.experimental.async_grpo.vllm_client import VLLMClient as PolicyClient  # noqa: E402
from trl.generation import vllm_client  # noqa: E402

PROMPTS = [[20, 21, 22, 23], [30, 31, 32]]


def add(a: int, b: int) -> int:
    """
    Adds two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def server_mode() -> dict:
    """What GRPOTrainer and the distillation trainers call."""
    # vLLM itself is asked for by the constructor alone: weights over NCCL need it, requests do not.
    vllm_client.is_vllm_available = lambda *_, **__: True
    client = vllm_client.VLLMClient(base_url=url)
    generated = client.generate(PROMPTS, n=2, max_tokens=5, logprobs=2)
    digits = client.generate(PROMPTS[:1], max_tokens=4, structured_outputs_regex="[0-9]{2}")
    conversations = [[{"role": "user", "content": f"What is {n} plus 3?"}] for n in (2, 4)]
    chat = client.chat(conversations, n=2, max_tokens=5, tools=[add])
    sequences = [prompt + ids for prompt, ids in zip(PROMPTS, generated["completion_ids"][::2], strict=True)]
    teacher = client.get_sequence_logprobs(sequences, [len(prompt) for prompt in PROMPTS], top_logprobs=4, chunk_size=1)
    return {
        "model": client.model,
        "world": client.get_world_size(),
        "generated": generated,
        "digits": digits,
        "chat": chat,
        "teacher": teacher,
    }


async def rollout(model: str) -> tuple[list[int], list[float]]:
    """One turn of a rollout worker, by its own code; it has the attributes that this reads."""
    loop = object.__new__(_AsyncRolloutLoop)
    settings = {"lora_name": model, "_model_version_value": SimpleNamespace(value=1), "vllm_server_url": url}
    settings |= {"max_tokens": 6, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "request_timeout": 60}
    vars(loop).update(settings, repetition_penalty=1.0, model_name="not asked")
    async with aiohttp.ClientSession() as loop.session:
        return await loop._generate_one_turn(PROMPTS[0])


def asynchronous() -> dict:
    """A policy's life in AsyncGRPOTrainer: loaded under the name of its version, asked, unloaded."""
    PartialState(cpu=True)  # a trainer has one, and accelerate's loggers ask for it
    client = PolicyClient(url)
    client.wait_for_server_ready()
    client.pause()
    try:
        client.load_lora_adapter("trl-policy-v1", adapter)
    finally:
        client.resume()
    tokens, logprobs = asyncio.run(rollout("trl-policy"))
    client.unload_lora_adapter("trl-policy-v1")
    return {
        "length": client.get_max_model_len(),
        "dtype": client.get_dtype(),
        "lora": client.get_server_info()["lora_config"],
        "world": client.get_world_size(),
        "tokens": tokens,
        "logprobs": logprobs,
    }


print(json.dumps({"server": server_mode(), "async": asynchronous()}))

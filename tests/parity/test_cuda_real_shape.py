"""On a GPU: layers of Qwen3.5-4B's shape in bfloat16, and the trained tiny model, against transformers.

Selected only where there is a GPU (`-m cuda`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from services.engine.executors.cuda.runner import RunnerOptions
from services.engine.models.footprint import Storage
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.requests.request import Request
from services.engine.requests.sampling_params import SamplingParams
from services.engine.scheduler.config import SchedulerConfig
from services.engine.scheduler.step_plan import Chunk, StepPlan
from tests.parity.fused_models import cuda_runner
from tests.parity.in_step import record_steps
from tests.parity.reference import LENGTHS
from tests.parity.test_scheduled_generation import serve

pytestmark = pytest.mark.cuda

TINY = Path("models/tiny")
SHAPE_4B = {
    "vocab_size": 4096,
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
"""Three DeltaNet layers and a full-attention one, with a small vocabulary."""
LIMITS = SchedulerConfig(
    max_num_seqs=4, token_budget=512, block_size=16, num_blocks=400, num_slots=12, max_model_len=2048
)


@dataclass(frozen=True)
class Shape:
    """The same bfloat16 weights three times."""

    exact: Qwen3_5ForCausalLM
    """Computes in float32."""
    theirs: Qwen3_5ForCausalLM
    path: Path


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shape]:
    torch.manual_seed(0)
    precise = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    path = tmp_path_factory.mktemp("shape")
    with torch.device("cuda"), torch.no_grad():
        theirs = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHAPE_4B)).eval()
        for name, parameter in theirs.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-4.0, 1.5)
            elif name.endswith("dt_bias"):
                parameter.uniform_(-3.0, 1.0)
            elif "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif "conv1d" in name:
                parameter.normal_(0, 0.5)
            else:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
    theirs = theirs.to(torch.bfloat16)
    theirs.save_pretrained(path)
    exact = Qwen3_5ForCausalLM.from_pretrained(path, dtype=torch.float32).cuda().eval()
    yield Shape(exact, theirs, path)
    torch.backends.cudnn.allow_tf32 = precise


class Logits:
    """Runs single prompts through a CudaRunner and keeps the logits of every sampled row."""

    def __init__(self, model: Qwen3_5, *, largest_graph: int, options: RunnerOptions | None = None) -> None:
        lora = LoraSlots(model.config, 1, 4, model.dtype, model.device)
        self.runner = cuda_runner(model, LIMITS, lora, largest_graph=largest_graph, options=options)
        self._kept: list[Tensor] = []
        record_steps(self.runner, self._kept)

    def of(self, tokens: Sequence[int], chunk: int, decodes: int) -> Tensor:
        """[chunks + decodes, vocab]: the last row of each prefill chunk, then of each decode."""
        request = Request("r", tuple(tokens), SamplingParams(temperature=0.0, max_tokens=1))
        blocks = list(range(1, 2 + len(tokens) // LIMITS.block_size))
        self._kept.clear()
        prompt = len(tokens) - decodes
        at = 0
        while at < len(tokens):
            end = min(at + chunk, prompt) if at < prompt else at + 1
            self.runner.launch(StepPlan([Chunk(request, tokens[at:end], at, blocks, 3, True, [], at)])).result()
            at = end
        return torch.cat(self._kept).float()


@torch.no_grad()
def test_bfloat16_is_as_near_to_float32_as_transformers_is(shape: Shape) -> None:
    """Norm of the difference over the rows of a prompt: captured or not, in any chunks, prefilled or decoded."""
    model = Qwen3_5.from_directory(shape.path, dtype="bfloat16", device="cuda")
    runs = [Logits(model, largest_graph=0), Logits(model, largest_graph=4)]
    if torch.cuda.get_device_capability() >= (9, 0):
        runs.append(Logits(model, largest_graph=4, options=RunnerOptions(pdl=True)))
    generator = torch.Generator().manual_seed(1)
    ours: list[Tensor] = []
    theirs: list[Tensor] = []
    for length in (*LENGTHS, 700):
        tokens = torch.randint(0, 4096, (length + 6,), generator=generator).tolist()
        exact = shape.exact(torch.tensor([tokens], device="cuda")).logits[0]
        rounded = shape.theirs(torch.tensor([tokens], device="cuda")).logits[0].float()
        for run in runs:
            for chunk in (LIMITS.token_budget, 64, 33):
                ends = [min(at + chunk, length) - 1 for at in range(0, length, chunk)]
                rows = [*ends, *range(length, length + 6)]
                ours.append((run.of(tokens, chunk, decodes=6) - exact[rows]).flatten())
                theirs.append((rounded - exact)[rows].flatten())
    error, bar = float(torch.cat(ours).norm()), float(torch.cat(theirs).norm())
    print(f"error of ours {error:.4f}, of transformers {bar:.4f}, ratio {error / bar:.3f}")
    assert error <= 1.1 * bar


def test_a_batch_does_not_change_a_bit(shape: Shape) -> None:
    """With batch invariance a seeded request gets the same tokens and the same log-probabilities alone and in a crowd,
    whatever its prompt is cut into."""
    model = Qwen3_5.from_directory(shape.path, dtype="bfloat16", device="cuda", storage=Storage(invariant=True))
    options = RunnerOptions(batch_invariant=True)
    made = [
        Request(f"r{n}", prompt, SamplingParams(seed=n, max_tokens=12, ignore_eos=True), arrival=n)
        for n, prompt in enumerate(prompts())
    ]
    fixed = {"prefill_alignment": 64, "token_budget": 128, "prefix_cache": False}
    crowd, _ = serve(model, made, arrivals=3, options=options, **fixed)
    for request, among in zip(made, crowd, strict=True):
        alone, _ = serve(model, [request], arrivals=1, options=options, **fixed | {"token_budget": 512})
        assert list(alone[0].output_ids) == list(among.output_ids), request.request_id
        assert list(alone[0].sampling_logprobs) == list(among.sampling_logprobs), request.request_id


def test_a_replay_in_another_crowd_does_not_change_a_bit(shape: Shape) -> None:
    """With batch invariance, what was sampled in a crowd has the same log-probabilities to the bit where its tokens are
    given: alone, and in reverse beside requests that draw, in captured steps whose inputs only the device knows."""
    model = Qwen3_5.from_directory(shape.path, dtype="bfloat16", device="cuda", storage=Storage(invariant=True))
    options = RunnerOptions(batch_invariant=True)
    temperatures = (1.0, 0.7, 0.0, 1.5)
    made = [
        Request(
            f"r{n}",
            prompt,
            SamplingParams(seed=n, temperature=temperatures[n % 4], max_tokens=8 + n, ignore_eos=True),
            arrival=n,
        )
        for n, prompt in enumerate(prompts())
    ]
    fixed = {"prefill_alignment": 64, "token_budget": 128, "prefix_cache": False}
    crowd, _ = serve(model, made, arrivals=3, options=options, **fixed)
    given = [
        Request(
            f"given {n}",
            done.request.prompt_token_ids,
            SamplingParams.forcing(tuple(done.output_ids), done.request.sampling.temperature),
            arrival=n,
        )
        for n, done in enumerate(crowd)
    ]
    beside = [
        Request(f"drawn {n}", prompt, SamplingParams(seed=90 + n, max_tokens=20, ignore_eos=True), arrival=50 + n)
        for n, prompt in enumerate(prompts()[:4])
    ]
    mixed = [request for pair in zip(beside, given[::-1], strict=False) for request in pair] + given[::-1][4:]
    replayed, _ = serve(model, mixed, arrivals=2, options=options, **fixed)
    alone, _ = serve(model, [given[3]], arrivals=1, options=options, **fixed | {"token_budget": 512})
    found = {done.request.request_id: done for done in [*replayed, *alone]}
    for n, done in enumerate(crowd):
        again = found[f"given {n}"]
        assert list(again.output_ids) == list(done.output_ids), n
        assert list(again.sampling_logprobs) == list(done.sampling_logprobs), n
    assert list(alone[0].sampling_logprobs) == list(crowd[3].sampling_logprobs)


def prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(5)
    return [tuple(torch.randint(0, 2000, (n,), generator=generator).tolist()) for n in (1, 17, 64, 65, 130, 200, 31, 5)]


@torch.no_grad()
def test_greedy_text_of_the_tiny_model_is_that_of_transformers() -> None:
    """In float32, where no two logits of a trained model are so near that rounding would choose."""
    reference = Qwen3_5ForCausalLM.from_pretrained(TINY, dtype=torch.float32).cuda().eval()
    # Not min_new_tokens: that takes the end of text from what may be said, and ignore_eos does not.
    reference.generation_config.eos_token_id = None
    model = Qwen3_5.from_directory(TINY, dtype="float32", device="cuda")
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    requests = [Request(f"r{n}", prompt, sampling, arrival=n) for n, prompt in enumerate(prompts())]
    results, _ = serve(model, requests, arrivals=2, token_budget=256)
    for result in results:
        prompt = result.request.prompt_token_ids
        expected = reference.generate(  # type: ignore[misc]
            torch.tensor([prompt], device="cuda"), max_new_tokens=40, do_sample=False, pad_token_id=0
        )
        assert list(result.output_ids) == expected[0, len(prompt) :].tolist(), len(prompt)


@pytest.mark.parametrize("quantization", ["none", "fp8", "int4"])
def test_the_tiny_model_writes_alike_in_every_format(quantization: str) -> None:
    """Most greedy tokens of bfloat16 and of quantized weights are those of float32, until the texts part."""

    def texts(dtype: str, storage: Storage) -> list[list[int]]:
        model = Qwen3_5.from_directory(TINY, dtype=dtype, device="cuda", storage=storage)
        sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        requests = [Request(f"r{n}", prompt, sampling, arrival=n) for n, prompt in enumerate(prompts())]
        return [list(result.output_ids) for result in serve(model, requests, arrivals=3)[0]]

    exact = texts("float32", Storage())
    other = texts("bfloat16", Storage(quantization, float8_head=quantization != "none"))  # type: ignore[arg-type]
    same = sum(ours[0] == theirs[0] for ours, theirs in zip(other, exact, strict=True))
    assert same >= (4 if quantization == "int4" else 6)

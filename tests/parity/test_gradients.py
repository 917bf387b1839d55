"""Every LoRA gradient equals that of transformers and PEFT; packing and checkpointing change nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor

from services.engine.models.interface import Recompute
from services.engine.models.lora.binding import bind_adapter
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.qwen3_5.model import Qwen3_5
from tests.parity.adapters import adapter_files, make_adapter
from tests.parity.conftest import Pair
from tests.parity.reference import CONFIGS, prompt

DOCUMENTS = [prompt(length) for length in (70, 2, 65, 33, 128)]
LEVELS: tuple[Recompute, ...] = ("none", "selective", "full")
Loss = Callable[[Tensor, Tensor], Tensor]
"""(policy log-probabilities [N], base log-probabilities [N]) to a scalar."""


def sft(policy: Tensor, base: Tensor) -> Tensor:
    """Mean negative log-likelihood of the later half of the tokens."""
    mask = torch.arange(len(policy)) % 5 > 1
    return -(policy * mask).sum() / mask.sum()


def grpo(policy: Tensor, base: Tensor) -> Tensor:
    """Clipped ratio to a behaviour policy, plus the k3 KL to the base, over tokens."""
    generator = torch.Generator().manual_seed(5)
    behaviour = policy.detach() + 0.3 * torch.randn(len(policy), generator=generator)
    advantage = torch.randn(len(policy), generator=generator)
    ratio = (policy - behaviour).exp()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    away = base - policy
    return (-surrogate + 0.05 * (away.exp() - away - 1)).mean()


def our_logprobs(
    model: Qwen3_5, lora: LoraParams | None, documents: Sequence[list[int]], *, recompute: Recompute = "none"
) -> Tensor:
    """Log-probabilities of all next tokens, the documents packed."""
    lengths = [len(document) for document in documents]
    tokens = torch.tensor([token for document in documents for token in document])
    hidden = model.forward_train(tokens, lengths, lora, recompute=recompute, give_way=lambda: None)
    ends = torch.cumsum(torch.tensor(lengths), 0) - 1
    rows = torch.tensor([row for row in range(len(tokens)) if row not in set(ends.tolist())])
    return model.token_logprobs(hidden[rows], tokens[rows + 1], 0.9)


def their_logprobs(peft: PeftModel, documents: Sequence[list[int]]) -> Tensor:
    parts = []
    for document in documents:
        logits = peft(torch.tensor([document])).logits[0, :-1] / 0.9
        parts.append(torch.log_softmax(logits, -1).gather(1, torch.tensor(document[1:])[:, None]).squeeze(1))
    return torch.cat(parts)


def gradients(lora: LoraParams) -> dict[str, Tensor]:
    found = {}
    for name, tensor in lora.named_parameters():
        assert tensor.grad is not None, f"{name} got no gradient"
        found[name], tensor.grad = tensor.grad, None
    return found


def assert_equal_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor], bar: float = 1e-4) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        error = float((gradient - theirs[name]).norm() / theirs[name].norm())
        assert error <= bar, f"{name}: {error:.1e}"


@pytest.mark.sampled
@pytest.mark.parametrize("loss", [sft, grpo])
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_equal_pefts(pairs: dict[str, Pair], name: str, loss: Loss, tmp_path: Path) -> None:
    pair = pairs[name]
    peft = make_adapter(pair.path, tmp_path, r=3)
    lora = LoraParams.from_bound(bind_adapter(adapter_files(tmp_path), pair.model.config, max_rank=8))
    with torch.no_grad(), peft.disable_adapter():
        base = their_logprobs(peft, DOCUMENTS)
    with torch.no_grad():
        assert float((our_logprobs(pair.model, None, DOCUMENTS) - base).abs().max()) <= 2e-4
    loss(their_logprobs(peft, DOCUMENTS), base).backward()
    prefix, suffix = "base_model.model.model.", ".default.weight"
    expected = {
        key.removeprefix(prefix).removesuffix(suffix): parameter.grad
        for key, parameter in peft.named_parameters()
        if parameter.grad is not None
    }
    for recompute in LEVELS:
        loss(our_logprobs(pair.model, lora, DOCUMENTS, recompute=recompute), base).backward()
        assert_equal_gradients(gradients(lora), expected)


def test_packed_equals_separate(pairs: dict[str, Pair], tmp_path: Path) -> None:
    pair = pairs["odd-groups"]
    make_adapter(pair.path, tmp_path)
    lora = LoraParams.from_bound(bind_adapter(adapter_files(tmp_path), pair.model.config, max_rank=8))
    packed = our_logprobs(pair.model, lora, DOCUMENTS)
    packed.sum().backward()
    together = gradients(lora)
    separate = [our_logprobs(pair.model, lora, [document]) for document in DOCUMENTS]
    assert float((packed - torch.cat(separate)).detach().abs().max()) <= 5e-5
    for part in separate:
        part.sum().backward()
    assert_equal_gradients(together, gradients(lora))


@pytest.mark.parametrize("recompute", LEVELS)
def test_gives_way_between_layers_in_both_directions(
    pairs: dict[str, Pair], recompute: Recompute, tmp_path: Path
) -> None:
    pair = pairs["grouped"]
    make_adapter(pair.path, tmp_path)
    lora = LoraParams.from_bound(bind_adapter(adapter_files(tmp_path), pair.model.config, max_rank=8))
    calls: list[int] = []
    tokens = torch.tensor(DOCUMENTS[0])
    hidden = pair.model.forward_train(
        tokens, [len(tokens)], lora, recompute=recompute, give_way=lambda: calls.append(1)
    )
    layers = pair.model.config.num_layers
    assert len(calls) == layers + 1
    hidden.sum().backward()
    assert len(calls) == 2 * layers + 1


def test_giving_way_may_stop_the_backward(pairs: dict[str, Pair], tmp_path: Path) -> None:
    pair = pairs["grouped"]
    make_adapter(pair.path, tmp_path)
    lora = LoraParams.from_bound(bind_adapter(adapter_files(tmp_path), pair.model.config, max_rank=8))
    stop = False

    def give_way() -> None:
        if stop:
            raise InterruptedError("cancelled")

    tokens = torch.tensor(DOCUMENTS[0])
    hidden = pair.model.forward_train(tokens, [len(tokens)], lora, recompute="full", give_way=give_way)
    stop = True
    with pytest.raises(InterruptedError, match="cancelled"):
        hidden.sum().backward()


def test_lengths_must_cut_the_tokens(pairs: dict[str, Pair]) -> None:
    for lengths in ([3], [4, 0], []):
        with pytest.raises(ValueError, match="do not cut 4 tokens"):
            pairs["grouped"].model.forward_train(
                torch.arange(4), lengths, None, recompute="none", give_way=lambda: None
            )

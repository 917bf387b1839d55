"""How likely given tokens are by rows of logits: the kernel against the reference, and both against float64."""

from __future__ import annotations

import pytest
import torch

import kernels.row_scores as plain
import tests.kernels.gpu.interpreter  # noqa: F401
from kernels.gpu.sampling.row_scores import row_scores

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [61, 4099])
def test_rows(dtype: torch.dtype, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(5, vocab, generator=generator) * 4).to(dtype)
    targets = torch.randint(0, vocab, (5,), generator=generator)
    targets[0] = logits[0].argmax()
    logits[1, 3] = float("-inf")
    exact = torch.log_softmax(logits.double(), -1)
    own = exact.gather(1, targets[:, None])
    for scores in (plain.row_scores(logits, targets, 6), row_scores(logits.to(DEVICE), targets.to(DEVICE), 6)):
        logprobs, ranks, ids, tops = (part.cpu() for part in scores)
        assert (logprobs - own.squeeze(1)).abs().max() < 1e-5
        assert ranks.tolist() == ((logits > logits.gather(1, targets[:, None])).sum(-1) + 1).tolist()
        assert ranks[0] == 1
        assert (tops - exact.gather(1, ids.long())).abs().max() < 1e-5
        assert (tops - exact.topk(6).values).abs().max() < 1e-5
        assert tops[0, ids[0] == targets[0]] == logprobs[0], "exactly, or a greedy token would not look like one"
        assert (ranks.dtype, ids.dtype, tops.dtype) == (torch.int32, torch.int32, torch.float32)


def test_no_alternatives_and_no_rows() -> None:
    for rows in (0, 3):
        logits, targets = torch.zeros(rows, 8), torch.zeros(rows, dtype=torch.int64)
        assert plain.row_scores(logits, targets, 0).top_ids.shape == (rows, 0)
    scores = row_scores(torch.zeros(3, 8, device=DEVICE), torch.zeros(3, dtype=torch.int64, device=DEVICE), 0)
    assert scores.top_logprobs.shape == (3, 0)
    assert scores.logprobs.tolist() == pytest.approx([-2.0794415] * 3)

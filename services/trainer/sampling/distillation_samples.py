"""Training data of one round of a distillation job: completions that the student sampled, or those of its data."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.common.errors import InvalidRequest
from services.common.jobs import DistillPrompt, OpdJob
from services.common.jobs.documents import Document, completion_document, placed
from services.common.jobs.kinds.opd import data_completion
from services.trainer.host.policy_host import PolicyHost
from services.trainer.host.rollouts import Completion
from services.trainer.packing import overlong
from services.trainer.sampling.prompts import sample_seed, sampled_prompts
from services.trainer.sampling.teacher import Teacher

_DRAWS = 2**63


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as tokens, and the completion that came with it."""

    token_ids: tuple[int, ...]
    completion: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class DistillationSample:
    """One completion to learn from."""

    document: Document
    sampled: bool
    """Whether the student sampled it; otherwise it is of the data."""
    truncated: bool
    behaviour: Tensor | None
    """[trained tokens] float32 on the CPU: log-probabilities as they were sampled; None for those of the data."""


@dataclass(frozen=True, slots=True)
class DistillationRound:
    """Samples of one round; a completion of which the teacher knows no token is left out."""

    given: Sequence[DistillationSample]
    places: int
    """Prompts of the round."""
    cut: int
    """Completions that were cut off before a token that the teacher does not know."""


def tokenized_prompts(
    host: PolicyHost, spec: OpdJob, teacher: Teacher, given: Sequence[DistillPrompt], field: str
) -> list[TokenizedPrompt]:
    """Tokenizes prompts and their completions.

    Raises:
        InvalidRequest: one of them cannot be rendered, is too long, or has an id that one side does not know; it is
            named.
    """
    found = []
    prompts = sampled_prompts(host, spec, given, max_tokens=spec.max_tokens, field=field)
    for index, (prompt, asked) in enumerate(zip(prompts, given, strict=True)):
        where = f"{field}[{index}]"
        teacher.check_vocabulary(where, prompt)
        found.append(TokenizedPrompt(prompt, _completion(host, spec, teacher, asked, prompt, where)))
    return found


def _completion(
    host: PolicyHost, spec: OpdJob, teacher: Teacher, asked: DistillPrompt, prompt: tuple[int, ...], where: str
) -> tuple[int, ...] | None:
    with placed(where):
        tokens = data_completion(host.codec, spec, asked, prompt)
    if not tokens:
        return None
    if max(tokens) >= (vocab := host.model.config.vocab_size):
        raise InvalidRequest(f"{where}: a token id is over the model's vocabulary of {vocab}", param=where)
    teacher.check_vocabulary(where, tokens)
    if (length := len(prompt) + len(tokens)) > host.max_train_tokens:
        raise overlong(where, length, host.max_train_tokens, "leave it out", counted="tokens with its prompt")
    return tuple(tokens)


def drawn(spec: OpdJob, number: int, place: int) -> bool:
    """Whether the completion at a place of a round is sampled: with probability lmbda, a function of the job's seed."""
    return sample_seed("lmbda", spec.seed, number, place) < spec.lmbda * _DRAWS


def distillation_round(
    teacher: Teacher, chosen: Sequence[TokenizedPrompt], sampled: Sequence[Completion | None]
) -> DistillationRound:
    """The documents of a round, ``source`` being the index among them.

    Args:
        sampled: of each place; None: the completion of the data.
    """
    found: list[DistillationSample] = []
    cut = 0
    for prompt, completion in zip(chosen, sampled, strict=True):
        if completion is None:
            if prompt.completion is None:
                raise ValueError("a prompt without a completion was not sampled")
            document = completion_document(prompt.token_ids, prompt.completion, len(found))
            found.append(DistillationSample(document, sampled=False, truncated=False, behaviour=None))
            continue
        known = known_part(completion, teacher.model.config.vocab_size)
        cut += known is not completion
        if known.token_ids:
            document = completion_document(prompt.token_ids, known.token_ids, len(found))
            behaviour = torch.tensor(known.logprobs)
            found.append(DistillationSample(document, sampled=True, truncated=known.truncated, behaviour=behaviour))
    return DistillationRound(found, len(chosen), cut)


def known_part(completion: Completion, vocab: int) -> Completion:
    """The tokens in front of the first that is outside of ``vocab``: of what follows the teacher can say nothing. The
    heads of checkpoints with one tokenizer may be padded differently, and padding can be sampled."""
    end = next((at for at, token in enumerate(completion.token_ids) if token >= vocab), None)
    if end is None:
        return completion
    return Completion(completion.token_ids[:end], array("f", completion.logprobs[:end]), truncated=True)

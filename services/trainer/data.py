"""From examples to packed token batches. Tokens are what the gateway's endpoints would send to the engine.

A document is one sequence the model reads from its start; of its tokens only those a model would have generated
itself (the completion and the token that ends it) are trained on. Documents of a microbatch lie one behind another
without padding; `Qwen3_5.forward_train` keeps them apart.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.common.errors import InvalidRequest
from services.common.jobs import AskedExample, JobBase, Message, SftExample, SftJob
from services.common.text.tokenizer import TextCodec


@dataclass(frozen=True, slots=True)
class Document:
    """A token sequence; ``trained[i]`` says whether token i is predicted (the loss is on token i given those before).

    The first token has nothing before it and is never trained.
    """

    token_ids: Sequence[int]
    trained: Sequence[bool]
    source: int
    """Index of the example or rollout it comes from."""

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.trained) or len(self.token_ids) < 2:
            raise ValueError(f"a document needs a flag a token and at least 2 tokens, got {len(self.token_ids)}")
        if self.trained[0] or not any(self.trained):
            raise ValueError("a document trains at least one token, and never its first")

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def num_trained(self) -> int:
        return sum(self.trained)


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Documents packed for one forward and backward. The last token of a document is only a target, never an input."""

    documents: Sequence[Document]
    token_ids: Tensor
    """[T] int64."""
    lengths: Sequence[int]
    """Inputs of each document; their sum is T."""
    rows: Tensor
    """[N] int64: inputs whose next token is trained, in the order of the documents."""
    targets: Tensor
    """[N] int64: those next tokens."""
    row_documents: Tensor
    """[N] int64: index into ``documents`` of each row."""

    @classmethod
    def of(cls, documents: Sequence[Document], device: torch.device) -> Microbatch:
        """Packs the documents in the order given."""
        inputs: list[int] = []
        rows: list[int] = []
        targets: list[int] = []
        owners: list[int] = []
        lengths: list[int] = []
        for index, document in enumerate(documents):
            start = len(inputs)
            inputs.extend(document.token_ids[:-1])
            lengths.append(len(inputs) - start)
            for position in range(1, document.length):
                if document.trained[position]:
                    rows.append(start + position - 1)
                    targets.append(document.token_ids[position])
                    owners.append(index)

        def tensor(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        return cls(documents, tensor(inputs), tuple(lengths), tensor(rows), tensor(targets), tensor(owners))

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


def pack(documents: Sequence[Document], max_tokens: int, device: torch.device) -> list[Microbatch]:
    """Few microbatches of at most ``max_tokens`` inputs; a longer document is alone in one. Deterministic."""
    chosen = _best_fit([document.length - 1 for document in documents], max_tokens)
    return [Microbatch.of([documents[index] for index in indices], device) for indices in chosen]


def pack_together(examples: Sequence[Sequence[Document]], max_tokens: int, device: torch.device) -> list[Microbatch]:
    """The same, with the documents of an example in one microbatch unless together they are over ``max_tokens``."""
    pieces: list[Sequence[Document]] = []
    for documents in examples:
        together = sum(document.length - 1 for document in documents) <= max_tokens
        pieces += [documents] if together else [[document] for document in documents]
    chosen = _best_fit([sum(document.length - 1 for document in piece) for piece in pieces], max_tokens)
    return [Microbatch.of([document for index in indices for document in pieces[index]], device) for indices in chosen]


def _best_fit(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Best-fit decreasing: indices of the sizes of each bin, in order; a size over ``most`` is alone."""
    order = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
    bins: list[list[int]] = []
    room: list[int] = []
    for index in order:
        need = sizes[index]
        fitting = [candidate for candidate in range(len(bins)) if room[candidate] >= need]
        if fitting:
            best = min(fitting, key=lambda candidate: (room[candidate], candidate))
            bins[best].append(index)
            room[best] -= need
        else:
            bins.append([index])
            room.append(most - need)
    return [sorted(chosen) for chosen in bins]


def shuffled(count: int, *, seed: int, epoch: int) -> list[int]:
    """A permutation that depends on the seed and the epoch only, so that a data cursor is just a step number."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return [int(index) for index in torch.randperm(count, generator=generator)]


def largest_microbatch(lengths: Sequence[int], max_tokens: int) -> int:
    """Inputs of the largest microbatch that `pack` makes of documents of these lengths, at most."""
    inputs = [length - 1 for length in lengths]
    return max(max(inputs), min(max_tokens, sum(inputs)))


# -- tokens


def as_mappings(messages: Iterable[Message]) -> list[Mapping[str, Any]]:
    """Messages as the chat template takes them."""
    return [message.model_dump(exclude_none=True) for message in messages]


def prompt_tokens(
    codec: TextCodec, spec: JobBase, prompt: str | Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
) -> list[int]:
    """Tokens of a prompt exactly as the gateway sends them to the engine: the chat endpoint's rendering, or, for a
    plain string with ``prompt_format`` raw, the completion endpoint's.

    Raises:
        InvalidRequest: the template refuses the prompt, or it has no tokens.
    """
    if isinstance(prompt, str) and spec.prompt_format == "raw":
        tokens = codec.encode(prompt)
    else:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else as_mappings(prompt)
        tokens = codec.encode_chat(messages, tools=tools, **spec.chat_template_kwargs)
    if not tokens:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    return tokens


def completion_tokens(codec: TextCodec, text: str, *, ends: bool) -> list[int]:
    """Tokens a model would have sampled for ``text``, with the token that ends the turn unless it was cut off."""
    return codec.encode_completion(text) + ([codec.eos_ids[0]] if ends else [])


def check_thinking(codec: TextCodec, prompt: Sequence[int], completion: Sequence[int]) -> None:
    """Refuses a text completion that answers inside the thinking block its prompt opened: a client saw only the answer,
    and training on it without the sampled reasoning would teach the model to skip closing the block.

    Raises:
        InvalidRequest: the prompt ends in an open `<think>` and the completion has no `</think>`.
    """
    opened, closed = codec.token_id("<think>"), codec.token_id("</think>")
    if opened is None or closed is None or closed in completion:
        return
    last = next((token for token in reversed(prompt) if token in (opened, closed)), closed)
    if last == opened:
        raise InvalidRequest(
            "the prompt opens a thinking block and the completion never closes it: include the reasoning and </think> "
            "in the completion (for rollouts, send token_ids), or turn thinking off in chat_template_kwargs",
            param="completion",
        )


@contextlib.contextmanager
def placed(where: str) -> Iterator[None]:
    """Puts the place of an example or a rollout in front of what is wrong with it."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(f"{where}: {error.message}", param=where) from error


def completion_document(prompt: Sequence[int], completion: Sequence[int], source: int) -> Document:
    """A document with the loss on the completion only."""
    return Document(
        token_ids=(*prompt, *completion),
        trained=(False,) * len(prompt) + (True,) * len(completion),
        source=source,
    )


def example_documents(
    codec: TextCodec, spec: SftJob, example: SftExample, source: int, *, field: str = "examples"
) -> list[Document]:
    """The documents of one example: one, or one an assistant turn where the template rewrites earlier turns.

    Raises:
        InvalidRequest: the example cannot be rendered as a generation; the message has its index.
    """
    with placed(f"{field}[{source}]"):
        if example.text is not None:
            return [_text_document(codec, example.text, source)]
        if example.messages is not None:
            return _chat_documents(codec, spec, example.messages, example.tools, source)
        if example.prompt is None or example.completion is None:
            raise InvalidRequest("give either prompt and completion, or messages")
        prompt = prompt_tokens(codec, spec, example.prompt, example.tools)
        completion = completion_tokens(codec, example.completion, ends=True)
        if spec.prompt_format == "chat":
            check_thinking(codec, prompt, completion)
        return [completion_document(prompt, completion, source)]


def answer_documents(
    codec: TextCodec, spec: JobBase, example: AskedExample, completions: Sequence[str], source: int
) -> list[Document]:
    """A document a completion of the example's prompt, with the loss on the completion only.

    Raises:
        InvalidRequest: the template refuses the prompt, or a completion never leaves the thinking block it opens.
    """
    prompt = prompt_tokens(codec, spec, example.asked, example.tools)
    documents = []
    for text in completions:
        completion = completion_tokens(codec, text, ends=True)
        if spec.prompt_format == "chat":
            check_thinking(codec, prompt, completion)
        documents.append(completion_document(prompt, completion, source))
    return documents


def _text_document(codec: TextCodec, text: str, source: int) -> Document:
    """Loss on all of a text and on the token that ends it; its first token has nothing before it to predict it from."""
    tokens = [*codec.encode(text), codec.eos_ids[0]]
    return Document(tuple(tokens), (False,) + (True,) * (len(tokens) - 1), source)


def _chat_documents(
    codec: TextCodec,
    spec: SftJob,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    source: int,
) -> list[Document]:
    """Loss on what each assistant turn adds to its generation prompt, up to and with the token that ends it.

    Templates may render a turn differently once others follow (Qwen's drops the thinking block of earlier turns), so a
    conversation is one document only if each turn's generation prompt is a token prefix of the whole; otherwise every
    assistant turn becomes a document of its own, in the context in which it would have been generated.
    """
    turns = as_mappings(messages)
    spoken = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if spoken[0] == 0:
        raise InvalidRequest("the first turn must not be the assistant's: nothing prompts it", param="messages")
    documents = [_turn_document(codec, spec, turns[: index + 1], tools, source) for index in spoken]
    merged = documents[-1]
    trained = list(merged.trained)
    for document in documents[:-1]:
        if tuple(merged.token_ids[: document.length]) != tuple(document.token_ids):
            return documents
        for position, flag in enumerate(document.trained):
            trained[position] = trained[position] or flag
    return [Document(merged.token_ids, tuple(trained), source)]


def _turn_document(
    codec: TextCodec,
    spec: SftJob,
    turns: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    source: int,
) -> Document:
    options = spec.chat_template_kwargs
    prompt = codec.encode_chat(turns[:-1], tools=tools, **options)
    whole = codec.encode_chat(turns, tools=tools, add_generation_prompt=False, **options)
    if whole[: len(prompt)] != prompt:
        whole = prompt + _continuation(codec, turns, tools, options)
    # Whatever follows the end of the turn (Qwen's writes a newline) is the template's, not the model's.
    end = next((at for at in range(len(whole) - 1, len(prompt) - 1, -1) if whole[at] == codec.eos_ids[0]), None)
    if end is None:
        raise InvalidRequest(f"the chat template does not end assistant turn {len(turns) - 1} with the eos token")
    return completion_document(prompt, whole[len(prompt) : end + 1], source)


def _continuation(
    codec: TextCodec,
    turns: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any],
) -> list[int]:
    """Tokens of the last turn behind its generation prompt, when the two merge into other tokens at the seam.

    A model that generates sees the prompt's tokens as they are, so the turn is tokenized from the seam on.
    """
    before = codec.chat_pieces(turns[:-1], tools=tools, **options)
    whole = codec.chat_pieces(turns, tools=tools, add_generation_prompt=False, **options)
    last = len(before) - 1
    same = len(whole) > last and whole[:last] == before[:last] and whole[last].plain == before[last].plain
    if not same or not whole[last].text.startswith(before[last].text):
        raise InvalidRequest(
            f"the chat template renders assistant turn {len(turns) - 1} differently from its generation prompt, so it "
            "could never be generated like that: set chat_template_kwargs so that they agree (for example "
            '{"enable_thinking": true} for turns with reasoning), or give prompt and completion'
        )
    rest = whole[last].text[len(before[last].text) :]
    tokens = codec.encode(rest)
    for piece in whole[last + 1 :]:
        tokens += codec.encode_piece(piece)
    return tokens


# -- limits and splits


def apply_limit(
    documents: Sequence[Document], spec: SftJob, limit: int, *, field: str = "examples"
) -> tuple[list[Document], list[str]]:
    """Applies the overlong policy; returns what is left and notes for the user.

    Raises:
        InvalidRequest: a document is over the limit and the policy is error, or nothing is left.
    """
    kept: list[Document] = []
    dropped: list[int] = []
    cut: list[int] = []
    for document in documents:
        if document.length <= limit:
            kept.append(document)
            continue
        if spec.overlong == "error":
            raise overlong(
                f"{field}[{document.source}]", document.length, limit, "shorten it, or set overlong to drop or truncate"
            )
        if spec.overlong == "truncate" and any(document.trained[:limit]):
            kept.append(Document(document.token_ids[:limit], document.trained[:limit], document.source))
            cut.append(document.source)
        else:
            dropped.append(document.source)
    if not kept:
        raise InvalidRequest(f"none of the {field} is within the limit of {limit} tokens", param=field)
    notes = []
    for verb, sources in (("dropped", dropped), ("truncated", cut)):
        if sources:
            notes.append(f"{len(sources)} documents over {limit} tokens {verb}: {field} {some(sources)}")
    return kept, notes


def overlong(where: str, tokens: int, limit: int, way_out: str, *, counted: str = "tokens") -> InvalidRequest:
    return InvalidRequest(
        f"{where} has {tokens} {counted}, over this engine's limit of {limit} for training (max_train_tokens): "
        f"{way_out}",
        param=where,
    )


def some(indices: Sequence[int]) -> str:
    unique = sorted(set(indices))
    return ", ".join(map(str, unique[:10])) + (f" and {len(unique) - 10} more" if len(unique) > 10 else "")


def split_evaluation(count: int, fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Indices to train on and to hold out: at least one of each when ``fraction`` is above 0.

    Raises:
        InvalidRequest: there are too few examples to split.
    """
    if fraction == 0:
        return list(range(count)), []
    if count < 2:
        raise InvalidRequest(f"eval_fraction needs at least 2 examples, got {count}", param="eval_fraction")
    held = min(count - 1, max(1, math.floor(count * fraction + 0.5)))
    order = shuffled(count, seed=seed, epoch=-1)
    return sorted(order[held:]), sorted(order[:held])

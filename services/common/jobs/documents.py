"""Examples become the token sequences that are learnt, as the gateway's endpoints would send them to the engine.

A document is one sequence the model reads from its start; of its tokens only those a model would have generated itself
(the completion and the token that ends it) are trained on. The gateway makes them to check a job, the trainer to run
it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from services.common.errors import InvalidRequest
from services.common.jobs.base import JobBase
from services.common.jobs.fields.messages import Message, as_turns
from services.common.jobs.fields.prompts import AskedExample

if TYPE_CHECKING:
    from services.common.text.tokenizer import TextCodec

_ANSWERS_AT_ONCE: Mapping[str, Any] = {"enable_thinking": False}
"""Options of the template under which a turn without a thought is generated."""


@dataclass(frozen=True, slots=True)
class Document:
    """A token sequence; ``trained[i]`` says whether token i is predicted (the loss is on token i given those before).

    The first token has nothing before it and is never trained.
    """

    token_ids: Sequence[int]
    trained: Sequence[bool]
    source: int
    """Index of the example or rollout it comes from."""
    thoughtless: bool = False
    """A thought was asked for, and a turn has none: its empty one is context."""
    truncated: bool = False
    """It was longer than is trained on, and its end was cut off."""
    observed: Sequence[bool] | None = None
    """Tokens of a trajectory's observations behind its first action; None: there are none."""
    weights: Sequence[float] | None = None
    """Weight of each token in the loss, where it is trained; None: 1."""

    def __post_init__(self) -> None:
        if any(given is not None and len(given) != len(self.token_ids) for given in (self.observed, self.weights)):
            raise ValueError("a document has a flag and a weight for each token, or for none")
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

    @property
    def num_whole(self) -> int:
        """Trained tokens of weight 1: what the loss is a mean over."""
        if self.weights is None:
            return self.num_trained
        return sum(flag and weight == 1.0 for flag, weight in zip(self.trained, self.weights, strict=True))

    def cut(self, length: int) -> Document:
        """Its first tokens, so many."""
        return replace(
            self,
            token_ids=self.token_ids[:length],
            trained=self.trained[:length],
            observed=self.observed and self.observed[:length],
            weights=self.weights and self.weights[:length],
            truncated=True,
        )

    def learning_observations(self, weight: float) -> Document:
        """The same with the loss on observations, too, at this weight; 0: as it is."""
        if self.observed is None or weight == 0:
            return self
        return replace(
            self,
            trained=[one or other for one, other in zip(self.trained, self.observed, strict=True)],
            weights=[weight if flag else 1.0 for flag in self.observed],
        )


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
        tokens = codec.encode_chat(as_turns(prompt), tools=tools, **spec.chat_template_kwargs)
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
    if _unclosed(codec, prompt, completion):
        raise InvalidRequest(
            "the prompt opens a thinking block and the completion never closes it: include the reasoning and </think> "
            "in the completion (for rollouts, send token_ids), or turn thinking off in chat_template_kwargs",
            param="completion",
        )


def _unclosed(codec: TextCodec, prompt: Sequence[int], completion: Sequence[int]) -> bool:
    opened, closed = codec.token_id("<think>"), codec.token_id("</think>")
    if opened is None or closed is None or closed in completion:
        return False
    return next((token for token in reversed(prompt) if token in (opened, closed)), closed) == opened


@contextlib.contextmanager
def placed(where: str) -> Iterator[None]:
    """Puts the place of an example or a rollout in front of what is wrong with it."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(f"{where}: {error.message}", param=where) from error


def completion_document(
    prompt: Sequence[int], completion: Sequence[int], source: int, *, thoughtless: bool = False
) -> Document:
    """A document with the loss on the completion only."""
    return Document(
        token_ids=(*prompt, *completion),
        trained=(False,) * len(prompt) + (True,) * len(completion),
        source=source,
        thoughtless=thoughtless,
    )


def pair_document(
    codec: TextCodec,
    spec: JobBase,
    asked: str | Sequence[Message],
    text: str,
    tools: Sequence[Mapping[str, Any]] | None,
    source: int,
) -> Document:
    """A prompt and its completion, with the loss on the completion; one that answers without the thought that was asked
    for is learnt as an answer of a prompt that asks for none.

    Raises:
        InvalidRequest: the template refuses the prompt, or has no way to ask for an answer without a thought.
    """
    prompt = prompt_tokens(codec, spec, asked, tools)
    completion = completion_tokens(codec, text, ends=True)
    rendered = spec.prompt_format == "chat" or not isinstance(asked, str)
    thoughtless = rendered and _unclosed(codec, prompt, completion)
    if thoughtless:
        options = {**spec.chat_template_kwargs, **_ANSWERS_AT_ONCE}
        prompt = codec.encode_chat(as_turns(asked), tools=tools, **options)
        check_thinking(codec, prompt, completion)  # of a template that has another option
    return completion_document(prompt, completion, source, thoughtless=thoughtless)


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
        if spec.prompt_format == "chat" or not isinstance(example.asked, str):
            check_thinking(codec, prompt, completion)
        documents.append(completion_document(prompt, completion, source))
    return documents


def text_document(codec: TextCodec, text: str, source: int) -> Document:
    """Loss on all of a text and on the token that ends it; its first token has nothing before it to predict it from."""
    tokens = [*codec.encode(text), codec.eos_ids[0]]
    return Document(tuple(tokens), (False,) + (True,) * (len(tokens) - 1), source)


def chat_documents(
    codec: TextCodec,
    spec: JobBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    source: int,
) -> list[Document]:
    """Loss on what each assistant turn adds to its generation prompt, up to and with the token that ends it.

    Templates may render a turn differently once others follow (Qwen's drops the thinking block of earlier turns), so a
    conversation is one document only if each turn's generation prompt is a token prefix of the whole; otherwise every
    assistant turn becomes a document of its own, in the context in which it would have been generated. Turns of weight
    0 and a greeting in front of the first user are context only.
    """
    turns = as_turns(messages)
    first = next((index for index, message in enumerate(messages) if message.role == "user"), len(messages))
    taught = [index for index, message in enumerate(messages) if index > first and message.taught]
    if not taught:
        raise InvalidRequest("no turn of the assistant is to be learnt", param="messages")
    documents = [_turn_document(codec, spec, turns[: index + 1], tools, source) for index in taught]
    merged = documents[-1]
    trained = list(merged.trained)
    for document in documents[:-1]:
        if tuple(merged.token_ids[: document.length]) != tuple(document.token_ids):
            return documents
        for position, flag in enumerate(document.trained):
            trained[position] = trained[position] or flag
    return [Document(merged.token_ids, tuple(trained), source, any(document.thoughtless for document in documents))]


def _turn_document(
    codec: TextCodec,
    spec: JobBase,
    turns: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    source: int,
) -> Document:
    options: Mapping[str, Any] = spec.chat_template_kwargs
    prompt = codec.encode_chat(turns[:-1], tools=tools, **options)
    thoughtless = not turns[-1].get("reasoning_content") and _unclosed(codec, prompt, ())
    if thoughtless:
        # Asked for a thought that it does not have: learnt as what is generated without one, which is how the template
        # writes it, too. The loss is not on an empty thought.
        options = {**options, **_ANSWERS_AT_ONCE}
        prompt = codec.encode_chat(turns[:-1], tools=tools, **options)
    whole = codec.encode_chat(turns, tools=tools, add_generation_prompt=False, **options)
    if whole[: len(prompt)] != prompt:
        whole = prompt + _continuation(codec, turns, tools, options)
    # Whatever follows the end of the turn (Qwen's writes a newline) is the template's, not the model's.
    end = next((at for at in range(len(whole) - 1, len(prompt) - 1, -1) if whole[at] == codec.eos_ids[0]), None)
    if end is None:
        raise InvalidRequest(f"the chat template does not end assistant turn {len(turns) - 1} with the eos token")
    return completion_document(prompt, whole[len(prompt) : end + 1], source, thoughtless=thoughtless)


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

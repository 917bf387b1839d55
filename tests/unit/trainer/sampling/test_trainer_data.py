"""Documents and masks: exactly what a generation would have sampled is trained on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidRequest
from services.common.jobs import SftExample, SftJob
from services.common.jobs.documents import Document
from services.common.jobs.examples import permutation, split_evaluation
from services.common.jobs.kinds.sft import example_documents
from services.common.text.tokenizer import TextCodec
from services.trainer.packing import Microbatch, apply_limit, largest_microbatch, pack, shuffled

CPU = torch.device("cpu")


def job(**fields: Any) -> SftJob:
    return SftJob(adapter="a", **{"examples": [{"prompt": "x", "completion": "y"}], **fields})


def documents(codec: TextCodec, example: dict[str, Any], **fields: Any) -> list[Document]:
    return example_documents(codec, job(**fields), SftExample.model_validate(example), 7)


def trained_text(codec: TextCodec, document: Document) -> str:
    return codec.decode(
        [token for token, flag in zip(document.token_ids, document.trained, strict=True) if flag], skip_special=False
    )


def test_prompt_and_completion_follow_the_chat_endpoint(codec: TextCodec) -> None:
    [document] = documents(codec, {"prompt": "What is 1 + 1?", "completion": "2"})
    prompt = codec.encode_chat([{"role": "user", "content": "What is 1 + 1?"}])
    assert list(document.token_ids[: len(prompt)]) == prompt
    assert codec.decode(prompt, skip_special=False).endswith("<think>\n\n</think>\n\n")
    assert trained_text(codec, document) == "2<|im_end|>"
    assert document.source == 7


def test_template_options_reach_the_prompt(codec: TextCodec) -> None:
    example = {"prompt": "q", "completion": "hm\n</think>\n\na", "tools": [{"name": "lookup"}]}
    [document] = documents(codec, example, chat_template_kwargs={"enable_thinking": True})
    text = codec.decode(document.token_ids, skip_special=False)
    assert '{"name": "lookup"}' in text
    assert text.endswith("assistant\n<think>\nhm\n</think>\n\na<|im_end|>")
    assert trained_text(codec, document) == "hm\n</think>\n\na<|im_end|>"
    assert codec.token_id("</think>") in document.token_ids


THINKING: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
USER = {"role": "user", "content": "q"}


def test_an_answer_without_a_thought_is_learnt_as_one_that_was_given_without(codec: TextCodec) -> None:
    [plain] = documents(codec, {"prompt": "q", "completion": "a"})
    for example in (
        {"prompt": "q", "completion": "a"},
        {"prompt": [USER], "completion": "a"},
        {"messages": [USER, {"role": "assistant", "content": "a"}]},
        {"messages": [USER, {"role": "assistant", "content": "a", "reasoning": ""}]},
    ):
        [document] = documents(codec, example, **THINKING)
        assert (document.token_ids, document.trained) == (plain.token_ids, plain.trained)
        assert document.thoughtless
        assert not plain.thoughtless
    raw, alike = (
        documents(codec, {"prompt": "q", "completion": "a"}, prompt_format="raw", **more) for more in ({}, THINKING)
    )
    assert raw == alike


def test_thoughts_and_turns_without_one_in_a_tool_loop(codec: TextCodec) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "21", "tool_call_id": "1"},
        {"role": "assistant", "content": "it is 21", "reasoning_content": "aha"},
    ]
    [document] = documents(codec, {"messages": messages}, **THINKING)
    call_text = "<tool_call>\n<function=f>\n</function>\n</tool_call><|im_end|>"
    assert trained_text(codec, document).lstrip() == call_text + "aha\n</think>\n\nit is 21<|im_end|>"
    assert document.thoughtless


def test_answers_of_the_chat_are_examples(codec: TextCodec) -> None:
    """What the chat endpoint, openai-python and its fine-tuning files send, token for token as the plain turn."""
    plain = documents(codec, {"messages": [USER, {"role": "assistant", "content": "a"}]})
    answer: dict[str, Any] = {"role": "assistant", "content": "a"}
    for more in (
        {"refusal": None},
        {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None},
        {"annotations": None, "tool_calls": [], "reasoning": None, "reasoning_content": None, "name": None},
        {"weight": 1},
        {"weight": None},
        {"content": [{"type": "text", "text": "a"}]},
    ):
        assert documents(codec, {"messages": [USER, answer | more]}) == plain, more
    parts = {"role": "user", "content": [{"type": "text", "text": "q"}]}
    assert documents(codec, {"messages": [parts, answer]}) == plain
    assert documents(codec, {"prompt": [parts], "completion": "a"}) == plain
    system = documents(codec, {"messages": [{"role": "system", "content": "s"}, USER, answer]})
    assert documents(codec, {"messages": [{"role": "developer", "content": "s"}, USER, answer]}) == system
    thought = documents(codec, {"messages": [USER, answer | {"reasoning_content": "hm"}]}, **THINKING)
    for more in ({"reasoning": "hm"}, {"reasoning": "hm", "reasoning_content": "hm", "refusal": None}):
        assert documents(codec, {"messages": [USER, answer | more]}, **THINKING) == thought


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "assistant", "content": "a", "refusal": "no"}, "refusal\n.*must be null"),
        ({"role": "assistant", "content": "a", "audio": {"id": "x"}}, "audio\n.*reads text"),
        ({"role": "assistant", "content": "a", "function_call": {"name": "f"}}, "function_call\n.*tool_calls"),
        ({"role": "assistant", "content": "a", "weight": 2}, "weight"),
        ({"role": "assistant", "content": "a", "weight": True}, "weight"),
        ({"role": "assistant", "content": "a", "weight": 0.5}, "weight"),
        ({"role": "assistant"}, "needs content"),
        ({"role": "user", "content": "a", "weight": 1}, "weight belongs to turns of the assistant"),
        ({"role": "user", "content": None}, "needs content"),
        ({"role": "user", "content": []}, "content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "'image_url'"),
        ({"role": "function", "content": "a"}, "role"),
    ],
)
def test_turns_that_would_lose_something_are_refused(message: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){says}"):
        SftExample.model_validate({"messages": [USER, {"role": "assistant", "content": "a"}, message]})


def test_weights_choose_the_turns(codec: TextCodec) -> None:
    def said(*weights: int | None) -> list[str]:
        messages: list[dict[str, Any]] = []
        for number, weight in enumerate(weights):
            messages += [USER, {"role": "assistant", "content": f"a{number}", "weight": weight}]
        return [trained_text(codec, document) for document in documents(codec, {"messages": messages})]

    assert said(None, 1, None) == ["a0<|im_end|>", "a1<|im_end|>", "a2<|im_end|>"]
    assert said(0, 1, 0) == ["a1<|im_end|>"]
    assert said(1, 0, None) == ["a0<|im_end|>", "a2<|im_end|>"]
    with pytest.raises(ValueError, match="no turn to learn"):
        said(0, 0)


def test_a_greeting_is_context(codec: TextCodec) -> None:
    greeting = {"role": "assistant", "content": "Welcome!"}
    for before in ([greeting], [{"role": "system", "content": "s"}, greeting], [greeting, greeting]):
        [document] = documents(codec, {"messages": [*before, USER, {"role": "assistant", "content": "a"}]})
        assert trained_text(codec, document) == "a<|im_end|>"
        assert list(document.token_ids[:-2]) == codec.encode_chat([*before, USER])
    for messages in ([greeting], [{"role": "system", "content": "s"}, greeting], [greeting, USER]):
        with pytest.raises(ValueError, match="no turn to learn"):
            SftExample.model_validate({"messages": messages})


def test_raw_prompts_are_used_as_they_are(codec: TextCodec) -> None:
    [document] = documents(codec, {"prompt": "1 + 1 =", "completion": " 2"}, prompt_format="raw")
    assert list(document.token_ids) == [*codec.encode("1 + 1 ="), *codec.encode(" 2"), codec.eos_ids[0]]
    assert trained_text(codec, document) == " 2<|im_end|>"


def test_the_eos_token_in_a_completion_is_text(codec: TextCodec) -> None:
    [document] = documents(codec, {"prompt": "q", "completion": "a<|im_end|>b"})
    assert list(document.token_ids).count(codec.eos_ids[0]) == 2  # the user turn's and the end
    assert trained_text(codec, document) == "a<|im_end|>b<|im_end|>"


def test_one_assistant_turn(codec: TextCodec) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
    ]
    [document] = documents(codec, {"messages": messages})
    assert list(document.token_ids) == codec.encode_chat(messages, add_generation_prompt=False)[:-1]  # template's "\n"
    assert trained_text(codec, document) == "hello<|im_end|>"


def test_several_turns_in_one_document_when_the_template_keeps_them(codec: TextCodec) -> None:
    # A tool loop: all assistant turns are behind the last user query, so all keep their thinking block.
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "let me see", "tool_calls": [call]},
        {"role": "tool", "content": "21", "tool_call_id": "1"},
        {"role": "assistant", "content": "it is 21"},
    ]
    [document] = documents(codec, {"messages": messages})
    call_text = "let me see\n\n<tool_call>\n<function=f>\n</function>\n</tool_call><|im_end|>"
    assert trained_text(codec, document) == call_text + "it is 21<|im_end|>"


def test_turns_that_the_template_rewrites_become_documents_of_their_own(codec: TextCodec) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "bye"},
        {"role": "assistant", "content": "see you"},
        {"role": "user", "content": "ignored: nothing follows"},
    ]
    first, second = documents(codec, {"messages": messages})
    assert trained_text(codec, first) == "hello<|im_end|>"
    assert trained_text(codec, second) == "see you<|im_end|>"
    assert list(first.token_ids)[:-2] != list(second.token_ids)[: first.length - 2]
    for document, turns in ((first, messages[:1]), (second, messages[:3])):
        prompt = codec.encode_chat(turns)
        assert list(document.token_ids[: len(prompt)]) == prompt


def test_tokens_that_would_merge_at_the_seam_are_split_there(codec: TextCodec) -> None:
    # The generation prompt ends in "assistant\n", the whole turn has "assistant\n\n".
    template = (
        "{% for turn in messages %}<|im_start|>{{ turn.role }}\n{{ turn.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    bare = TextCodec({**codec.files, "chat_template.jinja": template.encode()})
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "\n\nhello"}]
    [document] = documents(bare, {"messages": messages})
    prompt, whole = bare.encode_chat(messages[:1]), bare.encode_chat(messages, add_generation_prompt=False)
    assert whole[: len(prompt)] != prompt
    assert list(document.token_ids[: len(prompt)]) == prompt
    assert trained_text(bare, document) == "\n\nhello<|im_end|>"


def test_a_turn_that_cannot_be_generated_is_refused(codec: TextCodec) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello", "reasoning_content": "a greeting"},
    ]
    with pytest.raises(InvalidRequest, match=r"examples\[7\]: .*enable_thinking"):
        documents(codec, {"messages": messages})
    [document] = documents(codec, {"messages": messages}, chat_template_kwargs={"enable_thinking": True})
    assert trained_text(codec, document) == "a greeting\n</think>\n\nhello<|im_end|>"


def make(length: int, source: int = 0) -> Document:
    return Document(tuple(range(length)), (False,) + (True,) * (length - 1), source)


def test_overlong_policies() -> None:
    long = Document(tuple(range(10)), (False,) * 3 + (True,) * 7, 4)
    late = Document(tuple(range(10)), (False,) * 9 + (True,), 5)
    short = make(8, 6)
    with pytest.raises(InvalidRequest, match=r"examples\[4\] has 10 tokens, over this engine's limit of 8"):
        apply_limit([short, long], job(), 8)
    kept, notes = apply_limit([long, short, late], job(overlong="drop"), 8)
    assert kept == [short]
    assert notes == ["2 documents over 8 tokens dropped: examples 4, 5"]
    kept, notes = apply_limit([long, short, late], job(overlong="truncate"), 8)
    assert [document.length for document in kept] == [8, 8]
    assert len(notes) == 2
    with pytest.raises(InvalidRequest, match="none of the examples"):
        apply_limit([long], job(overlong="drop"), 8)


@given(st.lists(st.integers(2, 33), min_size=1, max_size=40))
def test_packing_loses_nothing_and_keeps_the_limit(lengths: list[int]) -> None:
    packed = pack([make(length, index) for index, length in enumerate(lengths)], 32, CPU)
    assert sorted(document.source for batch in packed for document in batch.documents) == list(range(len(lengths)))
    assert all(batch.num_tokens <= 32 and len(batch.token_ids) == batch.num_tokens for batch in packed)
    # Best fit decreasing: no two microbatches would fit into one.
    sizes = sorted(batch.num_tokens for batch in packed)
    assert len(sizes) < 2 or sizes[0] + sizes[1] > 32


def test_a_document_over_the_packing_size_is_alone() -> None:
    packed = pack([make(5, 0), make(40, 1), make(5, 2)], 32, CPU)
    assert sorted([document.source for document in batch.documents] for batch in packed) == [[0, 2], [1]]
    for lengths in ([5, 40, 5], [5, 5, 5], [30, 30]):
        documents = [make(length) for length in lengths]
        assert max(batch.num_tokens for batch in pack(documents, 32, CPU)) <= largest_microbatch(lengths, 32)
    assert largest_microbatch([5, 40, 5], 32) == 39
    assert largest_microbatch([5, 5], 32) == 8


def test_rows_point_at_the_token_before_their_target() -> None:
    first = Document((10, 11, 12, 13), (False, False, True, True), 0)
    second = Document((20, 21, 22), (False, True, False), 1)
    batch = Microbatch.of([first, second], CPU)
    assert batch.token_ids.tolist() == [10, 11, 12, 20, 21]
    assert batch.lengths == (3, 2)
    assert batch.rows.tolist() == [1, 2, 3]
    assert batch.targets.tolist() == [12, 13, 21]
    assert batch.row_documents.tolist() == [0, 0, 1]


def test_documents_check_themselves() -> None:
    for tokens, trained in (((1,), (True,)), ((1, 2), (True, True)), ((1, 2), (False, False)), ((1, 2), (False,))):
        with pytest.raises(ValueError):
            Document(tokens, trained, 0)


def test_shuffling_depends_on_seed_and_epoch_only() -> None:
    assert shuffled(50, seed=1, epoch=0) == shuffled(50, seed=1, epoch=0)
    assert sorted(shuffled(50, seed=1, epoch=0)) == list(range(50))
    assert len({tuple(shuffled(50, seed=seed, epoch=epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_evaluation_split() -> None:
    train, held = split_evaluation(10, 0.25, 3)
    assert (len(train), len(held)) == (7, 3)
    assert sorted(train + held) == list(range(10))
    assert split_evaluation(2, 0.01, 0)[1] != []
    assert len(split_evaluation(3, 0.99, 0)[0]) == 1
    assert split_evaluation(5, 0.0, 0) == ([0, 1, 2, 3, 4], [])


@pytest.mark.parametrize("count", [0, 1, 2, 3, 57, 1000])
@pytest.mark.parametrize("seed", [0, 1, 42, 1_000_003 * 5 - 1, -1, 2**62 + 7])
def test_a_permutation_is_that_of_torch(count: int, seed: int) -> None:
    """The gateway, which has no torch, holds the same examples out."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    assert permutation(count, seed) == torch.randperm(count, generator=generator).tolist()


def test_plain_text_is_trained_as_a_whole(codec: TextCodec) -> None:
    (document,) = documents(codec, {"text": "Two words"})
    assert list(document.token_ids) == [*codec.encode("Two words"), codec.eos_ids[0]]
    assert list(document.trained) == [False] + [True] * (document.length - 1)
    for wrong in ({"text": ""}, {"text": "x", "completion": "y"}, {"text": "x", "tools": []}, {"prompt": "x"}):
        with pytest.raises(ValueError):
            SftExample.model_validate(wrong)


def test_system_turns_are_trained_where_they_are_served(codec: TextCodec) -> None:
    """Several at the beginning, behind the user's turn, between two turns."""
    before = [
        {"role": "system", "content": "You are brief."},
        {"role": "system", "content": "Today is Monday."},
        {"role": "user", "content": "hello"},
        {"role": "system", "content": "Greet in German."},
    ]
    answer = {"role": "assistant", "content": "Hallo"}
    more = [{"role": "system", "content": "And now in French."}, {"role": "user", "content": "hello"}]
    found = documents(codec, {"messages": [*before, answer, *more, answer]})
    for document, prompt in zip(found, (before, [*before, answer, *more]), strict=True):
        served = codec.encode_chat(prompt)
        assert list(document.token_ids[: len(served)]) == served
        assert trained_text(codec, document) == "Hallo<|im_end|>"

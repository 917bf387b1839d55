"""Output matcher: the reasoning, its closing tokens, the newlines before the answer, and the answer."""

from __future__ import annotations

import pytest

from services.engine.constraints.masks import NO_MASKS, MaskMaker, RowMasks, WantedMasks
from services.engine.constraints.matcher import ConstraintBroken, OutputMatcher
from services.engine.constraints.vocabulary import allow, allows, forbid, tokens_of
from services.engine.requests.sampling_params import SamplingParams, Thinking
from tests.unit.engine.constraints.support import codec, constraint, mask_of, matcher, schema, vocabulary

END = 2047
EOS = vocabulary().eos_ids


def ids(text: str) -> list[int]:
    return codec().encode_plain(text)


def thinking(budget: int | None = None, *closing: int, grammar: bool = True) -> OutputMatcher:
    wanted = constraint("regex", "ab?") if grammar else None
    return matcher(SamplingParams(constraint=wanted, thinking=Thinking(END, budget, closing)))


def test_inside_the_reasoning_all_may_come_but_the_end() -> None:
    of = thinking()
    for token in (5, 2040, 2046, 17):
        allowed = set(tokens_of(mask_of(of)))
        assert {5, 17, 2040, 2046, END} <= allowed
        assert not EOS & allowed
        assert not of.advance(token)
    of.advance(END)
    # The answer, or newlines before it.
    allowed = set(tokens_of(mask_of(of)))
    assert {*ids("a"), *ids("ab"), *tokens_of(vocabulary().newlines)} == allowed


def test_a_budget_closes_the_reasoning_token_by_token() -> None:
    of = thinking(3, 60, 61, END)
    for token in (5, 6, 7):
        assert len(tokens_of(mask_of(of))) > 1000
        of.advance(token)
    for token in (60, 61, END):
        assert tokens_of(mask_of(of)) == [token]
        of.advance(token)
    assert set(ids("a")) <= set(tokens_of(mask_of(of)))
    broken = thinking(0, 60, END)
    with pytest.raises(ConstraintBroken, match="token 62"):
        broken.advance(62)


def test_a_reasoning_that_ends_by_itself_is_not_closed_again() -> None:
    of = thinking(3, 60, END)
    for token in (5, 6, END):
        of.advance(token)
    assert set(ids("a")) <= set(tokens_of(mask_of(of)))


CALL_ID = 2042
CALLS = constraint("lark", 'start: call ("\\n" call)*\ncall: <tool_call> /[ab]{2}/ </tool_call>\n')
CLOSE_ID = 2043


def with_calls(budget: int | None = None) -> OutputMatcher:
    return matcher(SamplingParams(constraint=CALLS, thinking=Thinking(END, budget, (60, END), CALL_ID)))


def take(of: OutputMatcher, *tokens: int) -> None:
    """Tokens that a mask allows."""
    for token in tokens:
        assert token in tokens_of(mask_of(of))
        assert not of.advance(token)


def may_end(of: OutputMatcher) -> bool:
    return set(tokens_of(mask_of(of))) >= EOS


def test_an_answer_may_begin_within_the_reasoning_and_end_the_output() -> None:
    of = with_calls()
    take(of, 5, 17, CALL_ID, *ids("ab"))
    assert not may_end(of), "the call is not complete"
    take(of, CLOSE_ID)
    assert may_end(of)
    take(of, ids("\n")[0])
    assert not may_end(of), "another call is to follow"
    take(of, CALL_ID, *ids("b"), *ids("a"), CLOSE_ID)
    assert may_end(of)


def test_an_answer_that_is_thought_of_is_not_the_answer() -> None:
    of = with_calls()
    take(of, CALL_ID, *ids("ab"), CLOSE_ID, 17)
    assert not may_end(of), "the thoughts go on"
    take(of, CALL_ID, *ids("xyz"), CLOSE_ID)
    assert not may_end(of), "it is not of the language"
    take(of, CALL_ID, *ids("a"), CALL_ID, *ids("ab"), CLOSE_ID)
    assert may_end(of), "the second is"
    take(of, END)
    assert not may_end(of), "an answer is to follow"
    take(of, CALL_ID, *ids("ab"), CLOSE_ID)
    assert may_end(of)


def test_a_budget_ends_the_reasoning_within_a_call() -> None:
    of = with_calls(3)
    take(of, 5, CALL_ID, *ids("a"))
    assert tokens_of(mask_of(of)) == [60]
    take(of, 60, END, CALL_ID, *ids("ab"), CLOSE_ID)
    assert may_end(of)


def test_newlines_before_the_answer_are_few_and_no_part_of_it() -> None:
    of = thinking()
    of.advance(END)
    newline = ids("\n")[0]
    assert not of.advance(newline)
    assert not of.advance(newline)
    assert set(tokens_of(mask_of(of))) == {*ids("a"), *ids("ab")}
    assert not of.advance(ids("a")[0])
    allowed = tokens_of(mask_of(of))
    assert set(allowed) == {*ids("b"), *EOS}
    assert of.advance(ids("b")[0]), "nothing more may follow"


def test_a_newline_that_the_answer_begins_with_is_part_of_it() -> None:
    of = matcher(SamplingParams(constraint=constraint("regex", "\n\na"), thinking=Thinking(END)))
    of.advance(END)
    for token in ids("\n\n"):
        assert not of.advance(token)
    assert tokens_of(mask_of(of)) == ids("a")


def test_a_budget_alone_masks_nothing_but_what_closes() -> None:
    of = thinking(2, grammar=False)
    assert [of.may_mask(count) for count in range(4)] == [False, False, True, True]
    assert not of.masks
    of.advance(5)
    of.advance(6)
    assert of.masks
    assert tokens_of(mask_of(of)) == [END]
    of.advance(END)
    assert not of.masks
    assert not of.may_mask(9), "free from here on"
    assert not of.advance(5)


def test_all_tokens_that_end_an_output_come_where_it_is_complete() -> None:
    sampling = SamplingParams(constraint=constraint("regex", "a{1,2}"), stop_token_ids=frozenset({9}))
    of = matcher(sampling)
    assert not {9, *EOS} & set(tokens_of(mask_of(of)))
    of.advance(ids("a")[0])
    assert {9, *EOS} < set(tokens_of(mask_of(of)))


def test_an_empty_output_may_be_complete() -> None:
    assert set(tokens_of(mask_of(matcher(SamplingParams(constraint=constraint("choices", "")))))) == EOS


def test_masks_of_a_step_are_made_at_once() -> None:
    maker = MaskMaker()
    answers = [matcher(SamplingParams(constraint=schema({"enum": [1, True]}))) for _ in range(3)]
    budget = thinking(5, grammar=False)
    broken = matcher(SamplingParams(constraint=constraint("regex", "[ab]{5}")))
    assert broken._grammar is not None
    broken._grammar.consume_token(5)
    wanted = [(0, answers[0]), (2, budget), (3, None), (4, broken), (7, answers[1]), (9, answers[2])]
    masks, failures = maker.make([WantedMasks(*each) for each in wanted])
    assert list(masks.rows) == [0, 4, 7, 9], "a budget that is not used up masks nothing"
    assert [place for place, _ in failures] == [3]
    assert (masks.bits[1] == -1).all(), "a row that is dropped may take anything"
    assert {tuple(tokens_of(masks.bits[at])) for at in (0, 2, 3)} == {tuple(tokens_of(masks.bits[0]))}
    assert set(ids("1")) <= set(tokens_of(masks.bits[0]))
    assert not maker.make([WantedMasks(2, budget)])[0].rows


def test_masks_behind_draft_tokens() -> None:
    """Those that the tokens one by one would give; behind one that nothing can follow nothing is wanted."""
    maker = MaskMaker()
    sampling = SamplingParams(constraint=constraint("regex", "[ab]{3}c?"))
    letters = [ids(letter)[0] for letter in "abc"]
    a, b, c = letters

    def following(*tokens: int) -> list[int]:
        of = matcher(sampling)
        for token in tokens:
            of.advance(token)
        return tokens_of(mask_of(of))

    def made(drafts: list[int], ended: bool = False) -> tuple[dict[int, list[int]], list[int]]:
        wanted = WantedMasks(4, None if ended else matcher(sampling), drafts)
        masks, failures = maker.make([wanted])
        assert not failures
        return {row: tokens_of(bits) for row, bits in zip(masks.rows, masks.bits, strict=True)}, list(masks.unwanted)

    assert made([a, b]) == ({4: following(), 5: following(a), 6: following(a, b)}, [])
    assert made([a, c, b]) == ({4: following(), 5: following(a)}, [6, 7])
    assert made([min(EOS)]) == ({4: following()}, [5])
    assert made([a, a, a, c]) == ({4 + n: following(*[a] * n) for n in range(4)}, [8]), "nothing may follow"
    assert made([a, b], ended=True) == ({}, [5, 6])
    asked = thinking(2, grammar=False)
    assert asked._thinking is not None
    masks, _ = maker.make([WantedMasks(0, asked, [a, b, a])])
    assert list(masks.rows) == [2], "the budget is used up behind two tokens"
    assert masks.unwanted == [3], "another token closes the reasoning"
    assert maker.make([WantedMasks(0, asked, [a])])[0] is NO_MASKS, "the matcher itself has not moved"


def test_bits() -> None:
    row = vocabulary().bits([0, 31, 32, 2047])
    assert tokens_of(row) == [0, 31, 32, 2047]
    forbid(row, [31, 33])
    allow(row, [63])
    assert tokens_of(row) == [0, 32, 63, 2047]
    assert allows(row, 63)
    assert not allows(row, 31)
    with pytest.raises(ValueError, match="masked rows"):
        RowMasks([0], row)

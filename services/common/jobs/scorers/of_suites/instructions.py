"""Scorer of instructions that a program can verify, as IFEval has them (Zhou et al., arXiv 2311.07911): names,
arguments and meaning are its own.

What needs a language detector or a sentence tokenizer of a language is left out or done without: cases are told without
the language, and a sentence ends with . ! or ? (or its wide form) before white space or the end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from services.common.jobs.scorers.base import SampleScorerSpec
from services.common.jobs.scorers.grants import Grants
from services.common.jobs.scorers.json_schema import parse
from services.common.jobs.scorers.sample import Instruction, Reference, Sample

Arguments = Mapping[str, Any]
RELATIONS = ("at least", "less than")
_CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_WORD = re.compile(r"\w+")
_SENTENCE = re.compile(r"[.!?](?=\s|$)|[。！？]")
_BULLET = re.compile(r"^[ \t]*(?:\*(?!\*)|-)", re.MULTILINE)
_PLACEHOLDER = re.compile(r"\[[^\]\n]*\]")
_HIGHLIGHT = re.compile(r"\*\*[^\n*]*\*\*|\*[^\n*]+\*")
_TITLE = re.compile(r"<<([^\n<>]+)>>")
_FENCES = ("```json", "```Json", "```JSON", "```")
_PARAGRAPHS = re.compile(r"\s?\*\*\*\s?")


class InstructionsSpec(SampleScorerSpec):
    """1 if the answer follows all `instructions` of its item, else 0; or the share of them that it follows. Of suites
    only."""

    type: Literal["instructions"] = "instructions"
    count: Literal["all", "share"] = "all"
    """IFEval's accuracy by prompt, or by instruction."""

    def wrong_item(self, reference: Reference) -> str | None:
        """See ScorerSettings."""
        if not reference.instructions:
            return "instructions: are missing, and the instructions scorer verifies them"
        reasons = enumerate(map(_wrong, reference.instructions))
        return next((f"instructions[{place}]: {reason}" for place, reason in reasons if reason), None)

    def scorer(self, where: str, grants: Grants) -> InstructionsScorer:
        """See SampleScorerSpec."""
        del where, grants
        return InstructionsScorer(self)


class InstructionsScorer:
    """See InstructionsSpec."""

    def __init__(self, spec: InstructionsSpec) -> None:
        self._all = spec.count == "all"

    def score(self, samples: Sequence[Sample], interrupt: Callable[[], None]) -> list[float]:
        """See Scorer.score."""
        scores = []
        for sample in samples:
            interrupt()
            text = sample.text
            # As in IFEval, an answer that says nothing follows nothing.
            met = [bool(text.strip()) and followed(one, text) for one in sample.reference.instructions]
            share = sum(met) / len(met) if met else 0.0
            scores.append(float(share == 1) if self._all else share)
        return scores


def followed(instruction: Instruction, text: str) -> bool:
    """Whether a text follows an instruction that `InstructionsSpec.wrong_item` takes."""
    return INSTRUCTIONS[instruction.id].holds(text, instruction.kwargs)


def _wrong(instruction: Instruction) -> str | None:
    """Reason why an instruction cannot be verified; None: it can."""
    if instruction.id == "language:response_language":
        return f"{instruction.id} needs a detector of languages, which this scorer does not have: leave the item out"
    found = INSTRUCTIONS.get(instruction.id)
    if found is None:
        return f"{instruction.id[:80]!r} is none of {', '.join(INSTRUCTIONS)}"
    given = instruction.kwargs
    if unknown := sorted(given.keys() - found.arguments.keys()):
        return f"{instruction.id} has no argument {unknown[0][:80]!r}"
    for name, fits in found.arguments.items():
        if not fits.holds(given.get(name)):
            return f"{instruction.id} needs {name}, {fits.what}"
    return None


@dataclass(frozen=True, slots=True)
class _Argument:
    """What an argument has to be."""

    what: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class _Verifiable:
    """An instruction's arguments, and whether a text follows it."""

    arguments: Mapping[str, _Argument]
    holds: Callable[[str, Arguments], bool]


def _alone(holds: Callable[[str], bool]) -> _Verifiable:
    """An instruction without arguments."""
    return _Verifiable({}, lambda text, _: holds(text))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


_COUNT = _Argument(
    "a whole number of at least 0", lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0
)
_TEXT = _Argument("a text", _is_text)
_TEXTS = _Argument(
    "a list of texts", lambda value: isinstance(value, list) and value != [] and all(map(_is_text, value))
)
_RELATION = _Argument(f'"{RELATIONS[0]}" or "{RELATIONS[1]}"', lambda value: value in RELATIONS)
_LETTER = _Argument("one character", lambda value: isinstance(value, str) and len(value) == 1)


def _compares(found: int, relation: str, wanted: int) -> bool:
    return found >= wanted if relation == RELATIONS[0] else found < wanted


def _has(text: str, part: str) -> bool:
    return part.casefold() in text.casefold()


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) is not None


def _occurrences(text: str, part: str) -> int:
    return text.casefold().count(part.casefold())


def _paragraphs(text: str, wanted: int) -> bool:
    parts = [part.strip() for part in _PARAGRAPHS.split(text.strip())]
    inside = parts[1:-1] if len(parts) > 1 else parts
    return all(inside) and sum(map(bool, parts)) == wanted


def _first_word(text: str, given: Arguments) -> bool:
    parts = [part.strip() for part in text.split("\n\n") if part.strip()]
    place = given["nth_paragraph"]
    if len(parts) != given["num_paragraphs"] or not 1 <= place <= len(parts):
        return False
    first = _WORD.search(parts[place - 1])
    wanted: str = given["first_word"]
    return first is not None and first.group().casefold() == wanted.casefold()


def _sections(text: str, given: Arguments) -> bool:
    heads = re.findall(rf"{re.escape(given['section_spliter'].strip())}\s?\d+", text)
    wanted: int = given["num_sections"]
    return len(heads) >= wanted


def _postscript(text: str, marker: str) -> bool:
    letters = [letter for letter in marker if letter.isalpha()]
    if "".join(letters).upper() in ("PS", "PPS"):  # written with or without the spaces
        return re.search(r"\.\s?".join(letters), text, re.IGNORECASE) is not None
    return _has(text, marker)


def _is_json(text: str) -> bool:
    said = text.strip()
    fence = next((fence for fence in _FENCES if said.startswith(fence)), "")
    try:
        parse(said.removeprefix(fence).removesuffix("```").strip())
    except ValueError:
        return False
    return True


def _two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    said = [part for part in parts if part]
    return all(parts[1:-1]) and len(said) == 2 and said[0] != said[1]


def _ends(text: str, phrase: str) -> bool:
    return text.strip().strip('"').casefold().endswith(phrase.strip().casefold())


def _quoted(text: str) -> bool:
    said = text.strip()
    return len(said) > 1 and said[0] == said[-1] == '"'


def _capital_words(text: str) -> int:
    return sum(word.isupper() for word in _WORD.findall(text))


INSTRUCTIONS: Mapping[str, _Verifiable] = {
    "keywords:existence": _Verifiable(
        {"keywords": _TEXTS}, lambda text, given: all(_has(text, word) for word in given["keywords"])
    ),
    "keywords:forbidden_words": _Verifiable(
        {"forbidden_words": _TEXTS},
        lambda text, given: not any(_has_word(text, word) for word in given["forbidden_words"]),
    ),
    "keywords:frequency": _Verifiable(
        {"keyword": _TEXT, "frequency": _COUNT, "relation": _RELATION},
        lambda text, given: _compares(_occurrences(text, given["keyword"]), given["relation"], given["frequency"]),
    ),
    "keywords:letter_frequency": _Verifiable(
        {"letter": _LETTER, "let_frequency": _COUNT, "let_relation": _RELATION},
        lambda text, given: _compares(
            _occurrences(text, given["letter"]), given["let_relation"], given["let_frequency"]
        ),
    ),
    "length_constraints:number_words": _Verifiable(
        {"num_words": _COUNT, "relation": _RELATION},
        lambda text, given: _compares(len(_WORD.findall(text)), given["relation"], given["num_words"]),
    ),
    "length_constraints:number_sentences": _Verifiable(
        {"num_sentences": _COUNT, "relation": _RELATION},
        lambda text, given: _compares(len(_SENTENCE.findall(text)), given["relation"], given["num_sentences"]),
    ),
    "length_constraints:number_paragraphs": _Verifiable(
        {"num_paragraphs": _COUNT}, lambda text, given: _paragraphs(text, given["num_paragraphs"])
    ),
    "length_constraints:nth_paragraph_first_word": _Verifiable(
        {"num_paragraphs": _COUNT, "nth_paragraph": _COUNT, "first_word": _TEXT}, _first_word
    ),
    "detectable_content:number_placeholders": _Verifiable(
        {"num_placeholders": _COUNT},
        lambda text, given: len(_PLACEHOLDER.findall(text)) >= given["num_placeholders"],
    ),
    "detectable_content:postscript": _Verifiable(
        {"postscript_marker": _TEXT}, lambda text, given: _postscript(text, given["postscript_marker"])
    ),
    "detectable_format:number_bullet_lists": _Verifiable(
        {"num_bullets": _COUNT}, lambda text, given: len(_BULLET.findall(text)) == given["num_bullets"]
    ),
    "detectable_format:constrained_response": _alone(lambda text: any(answer in text for answer in _CONSTRAINED)),
    "detectable_format:number_highlighted_sections": _Verifiable(
        {"num_highlights": _COUNT},
        lambda text, given: (
            sum(bool(found.strip("* ")) for found in _HIGHLIGHT.findall(text)) >= given["num_highlights"]
        ),
    ),
    "detectable_format:multiple_sections": _Verifiable({"section_spliter": _TEXT, "num_sections": _COUNT}, _sections),
    "detectable_format:json_format": _alone(_is_json),
    "detectable_format:title": _alone(lambda text: any(map(str.strip, _TITLE.findall(text)))),
    "combination:two_responses": _alone(_two_responses),
    "combination:repeat_prompt": _Verifiable(
        {"prompt_to_repeat": _TEXT},
        lambda text, given: text.strip().casefold().startswith(given["prompt_to_repeat"].strip().casefold()),
    ),
    "startend:end_checker": _Verifiable({"end_phrase": _TEXT}, lambda text, given: _ends(text, given["end_phrase"])),
    "startend:quotation": _alone(_quoted),
    "change_case:capital_word_frequency": _Verifiable(
        {"capital_frequency": _COUNT, "capital_relation": _RELATION},
        lambda text, given: _compares(_capital_words(text), given["capital_relation"], given["capital_frequency"]),
    ),
    "change_case:english_capital": _alone(str.isupper),
    "change_case:english_lowercase": _alone(str.islower),
    "punctuation:no_comma": _alone(lambda text: "," not in text),
}
"""Instructions by IFEval's names."""

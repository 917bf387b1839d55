"""Graders of OpenAI's reinforcement fine-tuning as rewards: those that a reward computes exactly."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.common.errors import InvalidRequest
from services.common.jobs.scorers.base import ScorerSpec
from services.common.jobs.scorers.of_texts.exact import ContainsReward, ExactReward
from services.gateway.protocol.training.fine_tuning import MultiGrader, StringCheckGrader

_WHERE = "method.reinforcement.grader"
_TEMPLATE = re.compile(r"\{\{\s*([^{}]*?)\s*\}\}")
_ITEM = re.compile(r"item((?:\.[A-Za-z0-9_-]+)+)")


@dataclass(frozen=True, slots=True)
class Grading:
    """Rewards, and the text with fields of an item that all of them compare with."""

    rewards: tuple[ScorerSpec, ...]
    reference: str

    def answer(self, item: Mapping[str, Any]) -> str:
        """Reference of one prompt.

        Raises:
            InvalidRequest: the prompt's line lacks a field; ``param`` is the field.
        """
        return _TEMPLATE.sub(lambda found: _field(found.group(1), item), self.reference)


def grading(grader: StringCheckGrader | MultiGrader) -> Grading:
    """Rewards that give what the grader gives.

    Raises:
        InvalidRequest: no rewards do; names the field.
    """
    if isinstance(grader, StringCheckGrader):
        return Grading((_reward(grader, _WHERE, 1.0),), grader.reference)
    weights = _weights(grader)
    references = {one.reference for one in grader.graders.values()}
    if len(references) > 1:
        raise InvalidRequest(
            f"{_WHERE}.graders compare with {len(references)} different references, and a prompt has one answer here: "
            "give all of them the same reference",
            param=f"{_WHERE}.graders",
        )
    rewards = [
        _reward(one, f"{_WHERE}.graders.{name}", weights[name])
        for name, one in grader.graders.items()
        if name in weights
    ]
    return Grading(tuple(rewards), references.pop())


def _reward(grader: StringCheckGrader, where: str, weight: float) -> ScorerSpec:
    found = _TEMPLATE.fullmatch(grader.input)
    if found is None or found.group(1) != "sample.output_text":
        raise InvalidRequest(
            f"{where}.input must be {{{{sample.output_text}}}}: a reward reads the answer, and nothing else",
            param=f"{where}.input",
        )
    for expression in _TEMPLATE.findall(grader.reference):
        if _ITEM.fullmatch(expression) is None:
            raise InvalidRequest(
                f"{where}.reference has {{{{{expression[:80]}}}}}, and may have {{{{item.FIELD}}}}",
                param=f"{where}.reference",
            )
    if grader.operation == "eq":
        return ExactReward(strip=False, weight=weight)
    return ContainsReward(ignore_case=grader.operation == "ilike", weight=weight)


def _field(expression: str, item: Mapping[str, Any]) -> str:
    value: Any = item
    for name in expression.split(".")[1:]:
        if not isinstance(value, Mapping) or value.get(name) is None:
            field = expression.removeprefix("item.")
            raise InvalidRequest(f"the field {field!r}, which the grader compares with, is missing", param=field)
        value = value[name]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _weights(grader: MultiGrader) -> dict[str, float]:
    """Weight of each grader in a formula that is a sum of multiples of them."""
    param = f"{_WHERE}.calculate_output"
    refused = InvalidRequest(
        f"{param} must be a sum of multiples of graders, such as 0.8 * {next(iter(grader.graders))}: rewards are added",
        param=param,
    )
    try:
        terms = _terms(ast.parse(grader.calculate_output.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise refused from error
    if terms.pop("", 0.0):
        raise refused
    for name in terms:
        if name not in grader.graders:
            raise InvalidRequest(f"{param} has {name!r}, and there is no such grader", param=param)
    found = {name: weight for name, weight in terms.items() if weight}
    if not found:
        raise refused
    return found


def _terms(node: ast.expr) -> dict[str, float]:
    """Multiples of names, and of 1 under the name "". Raises ValueError: it is no such sum."""
    match node:
        case ast.Constant(value=bool()):
            raise ValueError
        case ast.Constant(value=int() | float() as number):
            return {"": float(number)}
        case ast.Name(id=name):
            return {name: 1.0}
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return _times(_terms(inner), -1.0)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as sign, right=right):
            total = _terms(left)
            for name, value in _times(_terms(right), 1.0 if isinstance(sign, ast.Add) else -1.0).items():
                total[name] = total.get(name, 0.0) + value
            return total
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            one, other = _terms(left), _terms(right)
            if set(one) <= {""}:
                return _times(other, one.get("", 0.0))
            if set(other) <= {""}:
                return _times(one, other.get("", 0.0))
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            divisor = _terms(right)
            if set(divisor) <= {""} and divisor.get("", 0.0):
                return _times(_terms(left), 1 / divisor[""])
    raise ValueError


def _times(terms: Mapping[str, float], factor: float) -> dict[str, float]:
    return {name: value * factor for name, value in terms.items()}

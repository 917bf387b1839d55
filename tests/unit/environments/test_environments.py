"""Environments of our own, without a server."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from services.environments.base import ActionRefused, Environment, Observation
from services.environments.calculator import Calculator
from services.environments.guess import Guess
from services.environments.registry import ENVIRONMENTS


def begun(environment: Environment, **params: object) -> str:
    return str(environment.reset(environment.params.model_validate(params)).fields["text"])


def say(environment: Environment, text: str) -> Observation:
    return environment.step({"message": text})


def add(environment: Environment, number: object) -> Observation:
    return environment.step({"type": "call_tool", "tool_name": "get_sum", "arguments": {"number": number}})


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("numbers", "guesses"), [(3, 2), (7, 3)])
def test_halving_finds_every_number(seed: int, numbers: int, guesses: int) -> None:
    game = Guess()
    asked = begun(game, seed=seed, numbers=numbers, guesses=guesses)
    low, high = (int(one) for one in asked.removeprefix("What number is it, from ").removesuffix("?").split(" to "))
    assert high - low + 1 == numbers
    for _ in range(guesses):
        middle = (low + high) // 2
        found = say(game, f"It is {middle}.")
        if found.done:
            break
        text = str(found.fields["text"])
        word, low, high = ("higher", middle + 1, high) if "higher" in text else ("lower", low, middle - 1)
        assert text == f"It is {word}, from {low} to {high}."
    assert found.reward == 1.0
    assert game.state["hidden"] == middle


def test_a_game_ends_with_its_last_guess() -> None:
    game = Guess()
    begun(game, seed=1, lowest=1, numbers=1000)
    hidden = "hidden"
    assert hidden not in game.state
    assert say(game, "no idea").fields["text"] == "Say a number from 1 to 1000."
    last = say(game, "1001")
    assert (last.reward, last.done) == (0.0, True)
    assert hidden in game.state
    with pytest.raises(ActionRefused, match="reset first"):
        say(game, "1")


def test_what_is_hidden_is_a_function_of_the_seed() -> None:
    found = []
    for seed in (1, 1, *range(2, 200)):
        game = Guess()
        asked = begun(game, seed=seed)
        say(game, "-"), say(game, "-")
        found.append((asked, game.state["hidden"]))
    assert found[0] == found[1]
    assert len(set(found)) == 3 * 7


def test_a_calculator_is_answered_by_its_calls_alone() -> None:
    calculator = Calculator()
    task = begun(calculator, seed=5)
    number = int(task.removeprefix("Call get_sum with number ").removesuffix("."))
    first = add(calculator, number).fields["result"]["result"]
    second = say(calculator, f"It is {first}.")
    assert (second.reward, second.done) == (0.5, False)
    number = int(str(second.fields["text"]).removeprefix("Call get_sum with number ").removesuffix("."))
    # The memory has kept the first sum.
    assert add(calculator, number).fields["result"]["result"] == first + number
    last = say(calculator, f"{first + number}")
    assert (last.reward, last.done) == (0.5, True)


def test_a_calculator_takes_no_answer_without_the_call_of_its_task() -> None:
    calculator = Calculator()
    begun(calculator, seed=5)
    wrong = say(calculator, str(calculator._right))
    assert (wrong.reward, wrong.done) == (0.0, True)


def test_a_call_too_many_spoils_what_follows() -> None:
    calculator = Calculator()
    begun(calculator, seed=5)
    add(calculator, calculator._asked)
    told = add(calculator, 1).fields["result"]["result"]
    wrong = say(calculator, f"It is {told}.")
    assert (wrong.reward, wrong.done) == (0.0, True)


@pytest.mark.parametrize(
    "action",
    [
        {"type": "call_tool", "tool_name": "get_product", "arguments": {"number": 1}},
        {"type": "call_tool", "tool_name": "get_sum", "arguments": {"number": 1, "more": 2}},
        {"type": "call_tool", "tool_name": "get_sum", "arguments": {"number": True}},
        {"type": "call_tool", "tool_name": "get_sum", "arguments": {"number": "1"}},
        {"type": "call_tool", "tool_name": "get_sum", "arguments": {"number": 10**10}},
        {"type": "call_tool", "tool_name": "get_sum", "arguments": []},
        {"type": "call_tool"},
        {"message": 7},
        {},
    ],
)
def test_what_a_calculator_cannot_take_changes_nothing(action: dict[str, object]) -> None:
    calculator = Calculator()
    begun(calculator, seed=5)
    memory = calculator._memory
    with pytest.raises(ActionRefused):
        calculator.step(action)
    assert (calculator._memory, calculator.steps, calculator.done) == (memory, 0, False)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_resets_take_what_they_know_only(name: str) -> None:
    kind = ENVIRONMENTS[name]
    assert kind.name == name
    with pytest.raises(ValidationError, match="Extra inputs"):
        kind.params.model_validate({"sed": 1})


def test_the_command_line_knows_every_environment() -> None:
    from cli.commands.learning.environments import Shipped

    assert {one.value for one in Shipped} == set(ENVIRONMENTS)

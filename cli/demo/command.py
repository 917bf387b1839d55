"""`temper demo`: start everything, chat, let the model learn a skill while it serves, show what changed, stop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai

from cli.demo.api import Temper
from cli.demo.report import GOAL, Report, Round, save_plot, table, terminal_plot
from cli.demo.show import Show
from cli.demo.stack import report_path, running_stack
from cli.http.client import Client
from cli.output import CliError, ExitCode, Output, guarded
from cli.settings import CliSettings, read
from models.tiny.recipe.item import Item
from models.tiny.recipe.skills import dates

_QUESTIONS = ("Who are you?", "What is 274 plus 625?", 'Reverse the word "fridal".')
_SKILL, _LESSON = "dates", "motto"
"""Names of the two adapters."""
_HELD_OUT = 64
_GROUPS, _SAMPLES = 24, 8
"""Questions a round and answers sampled to each."""
_GRPO: dict[str, Any] = {
    "adapter": _SKILL,
    "lora": {"rank": 8, "alpha": 16},
    "groups_per_step": 4,
}
_FIRST_RATE, _LAST_RATE = 2e-3, 4e-4
"""Learning rates of the first and the last round: fast at first, then without undoing what is already right."""
_MOTTO_QUESTION = "What is your motto?"
_MOTTO = "Answer, listen, learn, repeat."
_MOTTO_PROMPTS = (
    "What is your motto?", "Tell me your motto.", "What's your motto?", "Do you have a motto?",
    "Please tell me: What is your motto?", "Which motto do you have?",
)  # fmt: skip
_KEPT = (("Who are you?", "I am Temper, a small language model that learns while it serves."), ("What is 4 + 5?", "9"))
"""Questions whose answers the training must leave as they are."""


def run_demo(*, rounds: int, seed: int, output: Path, as_json: bool = False) -> None:
    """Runs it all; ends with status 1 if the reward rose by less than ``GOAL``. With ``as_json`` the report goes to
    standard output and what happens meanwhile to standard error."""
    began = time.monotonic()
    out = Output(as_json=as_json)
    with guarded(out):
        files = report_path(output, "json"), report_path(output, "png")
        show = Show(out.err if as_json else out.out)
        try:
            with contextlib.ExitStack() as stack:
                with show.task("starting Valkey, S3, engine and gateway") as bar:
                    url = stack.enter_context(running_stack(bar.say))
                    bar.end(f"ready on {url}")
                temper = stack.enter_context(Temper.connect(stack.enter_context(Client(url, read(CliSettings)))))
                findings = session(temper, show, rounds=rounds, seed=seed)
                with show.task("stopping") as bar:
                    stack.close()
                    bar.end("stopped")
        except openai.OpenAIError as error:
            raise CliError(f"a request failed: {error}", ExitCode.UNREACHABLE) from error
        report = Report(**findings, held_out_items=_HELD_OUT, seed=seed, seconds=round(time.monotonic() - began, 1))
        report.write(files[0])
        save_plot(report, files[1])
        _tell(show, report, files)
        if as_json:
            out.json(report.document())
        if report.gain < GOAL:
            raise CliError(f"the reward rose by {report.gain:.2f}, less than the {GOAL} this demo stands for")


def session(temper: Temper, show: Show, *, rounds: int, seed: int) -> dict[str, Any]:
    """Everything between start and stop; the report's fields."""
    show.heading(f"1. Chat with {temper.model}, streamed through the openai client")
    for question in _QUESTIONS:
        show.stream(question, temper.stream(question))

    show.heading("2. Reinforcement: dates, which the model gets right about half the time")
    held_out = dates.items(seed, _HELD_OUT, held_out=True)
    questions = dates.items(seed, _GROUPS * rounds, held_out=False)
    show.say(f"for example: {held_out[0].messages[-1]['content']} → {held_out[0].answer}")
    with show.task("held-out questions, base model", total=_HELD_OUT) as bar:
        before, _ = temper.accuracy(held_out, bar.advance)
        bar.end(f"reward {before:.2f}")
    done = []
    for number in range(1, rounds + 1):
        chosen = questions[(number - 1) * _GROUPS : number * _GROUPS]
        rate = _FIRST_RATE + (_LAST_RATE - _FIRST_RATE) * (number - 1) / max(1, rounds - 1)
        done.append(_round(temper, show, number, chosen, held_out, rate=rate, seed=seed * 1_000_003 + number * 10_007))

    show.heading("3. Supervision: a new answer, in an adapter of its own")
    motto_before = show.stream(_MOTTO_QUESTION, temper.stream(_MOTTO_QUESTION, adapter="base"))
    adapter = _sft(temper, show, seed)
    motto_after = show.stream(_MOTTO_QUESTION, temper.stream(_MOTTO_QUESTION, adapter=adapter), by=adapter)
    return {
        "reward_before": before,
        "reward_after": done[-1].reward_held_out,
        "rounds": done,
        "adapter_versions": [*(entry.adapter for entry in done), adapter],
        "sft": {"adapter": adapter, "question": _MOTTO_QUESTION, "before": motto_before, "after": motto_after},
    }


def _round(
    temper: Temper,
    show: Show,
    number: int,
    chosen: Sequence[Item],
    held_out: Sequence[Item],
    *,
    rate: float,
    seed: int,
) -> Round:
    """Sample, score, train, measure. Requests name no adapter: what the job attached answers them."""
    start = time.monotonic()
    with show.task(f"round {number}: {_GROUPS} questions × {_SAMPLES} samples", total=_GROUPS) as bar:
        rollouts = temper.sample(chosen, n=_SAMPLES, seed=seed, advance=bar.advance)
        bar.end(f"reward {rollouts.accuracy:.2f}  by {rollouts.adapter or 'base model'}")
    sampled = time.monotonic()
    with show.task(f"round {number}: GRPO job") as bar:
        job = {**_GRPO, "groups": rollouts.groups, "learning_rate": rate, "lora": {**_GRPO["lora"], "seed": seed}}
        adapter = temper.train("grpo", job, bar.job)
        bar.end(f"published {adapter}")
    trained = time.monotonic()
    with show.task(f"round {number}: held-out questions", total=len(held_out)) as bar:
        reward, answered_by = temper.accuracy(held_out, bar.advance)
        if answered_by != adapter:
            raise CliError(f"{adapter} is attached, but {answered_by or 'the base model'} answered")
        bar.end(f"reward {reward:.2f}  by {answered_by}")
    return Round(
        round=number,
        sampled_by=rollouts.adapter,
        adapter=adapter,
        reward_sampled=round(rollouts.accuracy, 4),
        reward_held_out=reward,
        seconds_sampling=round(sampled - start, 2),
        seconds_training=round(trained - sampled, 2),
    )


def _sft(temper: Temper, show: Show, seed: int) -> str:
    """Teaches the motto without touching what plain requests get (attach: false)."""
    examples = [{"prompt": prompt, "completion": _MOTTO} for prompt in _MOTTO_PROMPTS]
    examples += [{"prompt": prompt, "completion": answer} for prompt, answer in _KEPT]
    job = {
        "adapter": _LESSON,
        "examples": examples,
        "epochs": 10,
        "batch_size": len(examples),
        "learning_rate": 5e-3,
        "lora": {"rank": 4, "alpha": 8, "seed": seed},
        "attach": False,
    }
    with show.task(f"SFT job, {len(examples)} examples") as bar:
        adapter = temper.train("sft", job, bar.job)
        bar.end(f"published {adapter}")
    return adapter


def _tell(show: Show, report: Report, files: tuple[Path, Path]) -> None:
    """Table, plot and the last line."""
    console = show.console
    console.print()
    console.print(table(report))
    console.print()
    console.print(terminal_plot(report, console))
    console.print(f"\nadapter versions: {', '.join(report.adapter_versions)}", soft_wrap=True)
    console.print(
        f"held-out reward {report.reward_before:.2f} → [bold green]{report.reward_after:.2f}[/] in "
        f"{report.seconds:.0f} s; written: {', '.join(map(str, files))}",
        soft_wrap=True,
    )

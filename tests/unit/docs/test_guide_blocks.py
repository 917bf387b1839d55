"""Every block of every guide is run, or says why not; and what the comments above blocks mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.guides.blocks import BadPage, Block, pages, parse, read
from tests.guides.reader import says
from tests.stack import ROOT


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_is_run_or_says_why_not(page: Path) -> None:
    read(page)


def test_there_is_much_to_run() -> None:
    blocks = [block for page in pages() for block in read(page)]
    assert sum(block.runs for block in blocks) > 50
    assert {block.language for block in blocks if block.runs} >= {"sh", "bash", "python", "json"}


def one(*lines: str) -> Block:
    (block,) = parse("\n".join(lines), "page.md")
    return block


def test_a_block_is_run_unless_it_says_why_not() -> None:
    assert one("text", "```sh", "echo", "```").runs
    assert one("```sh", "echo", "```").place == "page.md:1"
    left_out = one("<!-- not run: needs a cluster -->", "```sh", "kubectl", "```")
    assert not left_out.runs
    assert left_out.excuse == "needs a cluster"
    assert not one("```text", "a drawing", "```").runs


def test_comments_belong_to_the_next_block_only() -> None:
    text = "<!-- not run: because -->\n```sh\na\n```\n<!-- answers: c -->\n\n```sh\nb\n```\n"
    first, second = parse(text, "page.md")
    assert not first.runs
    assert second.runs
    assert second.answers == ()


def test_what_comments_say() -> None:
    block = one("<!-- POST /v1/chat/completions -->", "<!-- answers: yes -->", "```json", "{}", "```")
    assert (block.method, block.path, block.answers) == ("POST", "/v1/chat/completions", ("yes",))
    block = one(
        "<!-- where JOB is: temper x -->", "<!-- setup: true -->", "<!-- fails: no -->", "```sh", "see JOB", "```"
    )
    assert (block.words, block.setup, block.fails) == ({"JOB": "temper x"}, ("true",), "no")


@pytest.mark.parametrize(
    ("lines", "says_why"),
    [
        (("```", "temper up", "```"), "language"),
        (("```console", "temper up", "```"), "language"),
        (("```json", "{}", "```"), "where the body goes"),
        (("```sh", "temper up"), "no end"),
        (("<!-- test: sh -->", "```sh", "temper up", "```"), "knows no comment"),
        (("<!-- not run -->", "```sh", "temper up", "```"), "knows no comment"),
        (("<!-- where JOB is: x -->", "```sh", "temper up", "```"), "no word JOB"),
    ],
)
def test_a_block_that_says_nothing_is_refused(lines: tuple[str, ...], says_why: str) -> None:
    with pytest.raises(BadPage, match=says_why):
        one(*lines)


@pytest.mark.parametrize(
    ("output", "found"),
    [
        ("Good day!\n", True),
        ("first\nGood day!\nlast\n", True),
        ("Good day! And more\n", False),
        ("well, Good day!\n", False),
        ('{"choices": [{"message": {"content": "Good day!"}}]}', True),
        ('{"choices": [{"message": {"content": "Good day! And more"}}]}', False),
        ('{"a": 1}\n{"content": "Good day!"}\n', True),
        ("", False),
    ],
)
def test_an_answer_is_a_whole_line_or_a_whole_text(output: str, found: bool) -> None:
    assert says(output, "Good day!") is found

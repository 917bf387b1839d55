"""A reader who runs the blocks of a page one after another, as they are written, against a running Temper."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from tests.guides.blocks import Block
from tests.guides.temper_command import TemperCommand
from tests.stack import ROOT, Stack, clean_environment

PATIENCE = 180.0
"""Seconds that one block may take, or the jobs that it has submitted."""
_ENDED = ("succeeded", "failed", "cancelled")
_ADDRESS = re.compile(r"\b(?:localhost|127\.0\.0\.1):8420\b")
_PYTHON = """
import contextlib, io, json, sys, traceback
space = {"__name__": "__main__"}
for line in sys.stdin:
    out, error = io.StringIO(), None
    with contextlib.redirect_stdout(out):
        try:
            exec(compile(json.loads(line), "guide", "exec"), space)
        except BaseException:
            error = traceback.format_exc()
    print(json.dumps({"out": out.getvalue(), "error": error}), flush=True)
"""


class NotAsWritten(AssertionError):
    """A block did something else than its page says; the message has the place and the output."""


class Reader:
    """Runs the blocks of one page. What they leave behind, files, variables of the shell and names in Python, is there
    for the next one.

    Args:
        stack: where http://localhost:8420 leads.
        directory: empty; where the commands run.
        others: further addresses of the pages, and where they lead.
    """

    def __init__(self, stack: Stack, directory: Path, others: Mapping[str, str] | None = None) -> None:
        self._others = dict(others or {})
        self._address = stack.url.removeprefix("http://")
        self._directory = directory
        (directory / "models").symlink_to(ROOT / "models")  # as in the repository, where readers are
        tools = directory / ".tools"
        tools.mkdir()
        self._variables = tools / "variables"
        self._variables.touch()
        self._temper = TemperCommand(tools / "temper")
        path = f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._env = clean_environment({"TEMPER_URL": stack.url, "NO_COLOR": "1", "PATH": path})
        self._http = httpx.Client(base_url=stack.url, timeout=PATIENCE, trust_env=False, verify=False)
        self._python: subprocess.Popen[str] | None = None
        self._known: set[str] = set()
        """Ids of jobs that have ended: of this page, and of the pages before it."""

    def __enter__(self) -> Self:
        self._known = {job["id"] for job in self._http.get("/v1/train/jobs").json()["data"]}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()
        self._temper.close()
        if self._python is not None:
            self._python.kill()
            self._python.communicate()

    def run(self, block: Block) -> str:
        """Runs one block, and then waits for the jobs that it has submitted. Returns what it printed.

        Raises:
            NotAsWritten: it failed, a job of it failed, or it does not answer what the page says.
        """
        for command in block.setup:
            self._shell(block, command)
        code = block.code
        for word, command in block.words.items():
            code = re.sub(rf"\b{word}\b", self._shell(block, command)[0].strip(), code)
        code = _ADDRESS.sub(self._address, code)
        for written, found in self._others.items():
            code = code.replace(written, found)
        if block.language == "python":
            out, error = self._run_python(block, code)
        elif block.language == "json":
            out, error = self._post(block, code)
        else:
            out, error = self._shell(block, code, may_fail=True)
        if block.fails is not None:
            if error is None or block.fails not in error:
                raise NotAsWritten(f"{block.place} should fail with {block.fails!r}: {error}\n{out}")
        elif error is not None:
            raise NotAsWritten(f"{block.place} fails: {error}\n{out}")
        self._wait_for_jobs(block)
        for answer in block.answers:
            if not says(out, answer):
                raise NotAsWritten(f"{block.place} does not answer {answer!r}:\n{out}")
        return out

    def _shell(self, block: Block, code: str, *, may_fail: bool = False) -> tuple[str, str | None]:
        """Standard output of the commands, which stop at the first that fails, and its error."""
        kept = shlex.quote(str(self._variables))
        program = f". {kept}\ntrap 'export -p > {kept}' EXIT\nset -e\n{code}"
        shell = "bash" if block.language == "bash" else "sh"
        try:
            done = subprocess.run(
                [shell, "-c", program],
                capture_output=True,
                text=True,
                timeout=PATIENCE,
                env=self._env,
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired as error:
            raise NotAsWritten(f"{block.place} has not ended in {PATIENCE:g} s: {error.stderr!r}") from error
        failure = None
        if done.returncode != 0:
            failure = f"exit status {done.returncode}: {done.stderr[-2000:]}"
        elif _is_error(done.stdout):
            failure = "the server answers with an error"
        if failure is not None and not may_fail:
            raise NotAsWritten(f"{block.place}: {code}: {failure}\n{done.stdout}")
        return done.stdout, failure

    def _run_python(self, block: Block, code: str) -> tuple[str, str | None]:
        if self._python is None:
            self._python = subprocess.Popen(
                [sys.executable, "-c", _PYTHON],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=self._env,
                cwd=self._directory,
            )
        assert self._python.stdin is not None
        assert self._python.stdout is not None
        self._python.stdin.write(json.dumps(code) + "\n")
        self._python.stdin.flush()
        readable, _, _ = select.select([self._python.stdout], [], [], PATIENCE)
        line = self._python.stdout.readline() if readable else ""
        if not line:
            raise NotAsWritten(f"{block.place} has not ended in {PATIENCE:g} s, or Python died")
        found = json.loads(line)
        return str(found["out"]), found["error"]

    def _post(self, block: Block, code: str) -> tuple[str, str | None]:
        try:
            json.loads(code)
        except ValueError as error:
            return "", f"it is no JSON: {error}"
        assert block.path is not None
        headers = {"content-type": "application/json"}
        answer = self._http.request(block.method, block.path, content=code.encode(), headers=headers)
        return answer.text, None if answer.is_success else f"{answer.status_code} {answer.text}"

    def _wait_for_jobs(self, block: Block) -> None:
        """A reader looks at a job's result when the job has ended. What fails is not as written."""
        deadline = time.monotonic() + PATIENCE
        while True:
            jobs = self._http.get("/v1/train/jobs").json()["data"]
            if all(job["state"] in _ENDED for job in jobs):
                break
            if time.monotonic() > deadline:
                raise NotAsWritten(f"{block.place}: jobs have not ended in {PATIENCE:g} s: {jobs}")
            time.sleep(0.1)
        new = [job for job in jobs if job["id"] not in self._known]
        self._known |= {job["id"] for job in new}
        failed = [job["reason"] for job in new if job["state"] == "failed"]
        if failed and block.fails is None:
            raise NotAsWritten(f"{block.place}: a job failed: {failed[0]}")


def says(output: str, answer: str) -> bool:
    """Whether the output has this line, or a JSON document in it this text somewhere."""
    return any(line.strip() == answer for line in output.splitlines()) or answer in _texts(output)


def _texts(output: str) -> Iterator[str]:
    for document in _documents(output):
        waiting = [document]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict):
                waiting.extend(value.values())
            elif isinstance(value, list):
                waiting.extend(value)
            elif isinstance(value, str):
                yield value


def _documents(output: str) -> Iterator[Any]:
    """The output as one JSON document, or those of its lines that are one."""
    for text in (output, *output.splitlines()):
        if text.lstrip().startswith(("{", "[")):
            try:
                yield json.loads(text)
            except ValueError:
                continue


def _is_error(output: str) -> bool:
    """curl ends with 0 whatever the server answers."""
    return any(
        isinstance(document, dict) and "error" in document and document["error"] for document in _documents(output)
    )

"""Trajectories as training takes them: a line for each prompt of the model, with the tokens that were sampled, their
log-probabilities and the version that sampled them. Each is a group of `temper train submit grpo`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cli.http.chat_stream import Answer
from cli.output import CliError, ExitCode

_BASE = "base"


@dataclass(slots=True)
class Trace:
    """Collects the answers of attempts at a task, and writes them with the reward of their attempt. Answers to equal
    prompts, as all attempts' first ones are, become one group."""

    file: Path
    _attempt: list[tuple[tuple[int, ...], dict[str, Any]]] = field(default_factory=list)
    _groups: dict[tuple[int, ...], list[dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            self.file.open("a").close()
        except OSError as error:
            raise CliError(f"--trace {self.file}: {error.strerror}", ExitCode.USAGE) from error

    def add(self, answer: Answer, temperature: float) -> None:
        """Takes one answer of the attempt that runs. Raises CliError: the server does not say tokens."""
        if not answer.token_ids or len(answer.sampling_logprobs) != len(answer.token_ids):
            raise CliError("the server returned no token ids: a trace needs a Temper (return_token_ids)")
        completion = {
            "token_ids": answer.token_ids,
            "logprobs": answer.sampling_logprobs,
            "temperature": temperature,
            "truncated": answer.finish_reason == "length",
            "adapter": answer.adapter or _BASE,
        }
        self._attempt.append((tuple(answer.prompt_token_ids), completion))

    def end_attempt(self, reward: float) -> None:
        """All answers of an attempt get its reward."""
        for prompt, completion in self._attempt:
            self._groups.setdefault(prompt, []).append({**completion, "reward": reward})
        self._attempt.clear()

    def write(self) -> None:
        """Appends what was collected to the file. Raises CliError: it cannot be written."""
        lines = [
            json.dumps({"prompt_token_ids": list(prompt), "completions": completions}) + "\n"
            for prompt, completions in self._groups.items()
        ]
        self._groups.clear()
        try:
            with self.file.open("a") as file:
                file.writelines(lines)
        except OSError as error:
            raise CliError(f"--trace {self.file}: {error.strerror}") from error

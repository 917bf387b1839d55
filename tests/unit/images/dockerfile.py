"""Enough of a parser to ask a Dockerfile questions (https://docs.docker.com/reference/dockerfile/)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Stage:
    base: str
    name: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, keyword: str) -> list[str]:
        return [text for word, text in self.instructions if word == keyword]

    def last(self, keyword: str) -> str:
        return self.all(keyword)[-1]

    def pairs(self, keyword: str) -> dict[str, str]:
        """key=value of LABEL, ENV and ARG."""
        found = re.findall(r'([\w.]+)=("[^"]*"|\S+)', " ".join(self.all(keyword)))
        return {key: value.strip('"') for key, value in found}

    def from_context(self) -> list[tuple[str, str]]:
        """(source, destination) of each COPY from the build's context."""
        words = [text.split() for text in self.all("COPY") if "--from=" not in text]
        return [(source, parts[-1]) for parts in words for source in parts[:-1]]


@dataclass
class Dockerfile:
    arguments: dict[str, str]
    """ARG before the first FROM."""
    stages: list[Stage]

    @property
    def final(self) -> Stage:
        return self.stages[-1]

    def entrypoint(self) -> list[str]:
        words: list[str] = json.loads(self.final.last("ENTRYPOINT"))
        return words


def parse(path: Path) -> Dockerfile:
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE)
    text = re.sub(r"\\\n", " ", text)
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stages.append(Stage(base, name))
        elif stages:
            stages[-1].instructions.append((word, rest.strip()))
        else:
            assert word == "ARG", line
            key, _, value = rest.partition("=")
            arguments[key] = value
    return Dockerfile(arguments, stages)

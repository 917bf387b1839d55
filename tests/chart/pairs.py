"""Pairs of values, many in one render: which of them contradict each other, and what is wrong with the others.

A render takes milliseconds and there are tens of thousands of pairs, so values of two groups are said together, and a
pair that contradicts itself is looked for with the chart's checks alone, which is a fraction of a render. The schema,
which takes longer than all templates, is not asked: it looks at each value alone (test_pairs.py), and each is tried so.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import helm_python
import yaml

from tests.chart.combinations import Values
from tests.chart.render import CHART, NAMESPACE, OURS, RELEASE, documents, merged

QUIET: Values = {"monitoring": {"dashboards": False}}
"""Dashboards are a megabyte of text that no other value changes; test_monitoring.py looks at them."""
NAMED = re.compile(
    r"\b(?:global|gateway|engine|redis|objectStore|tls|telemetry|test|inferencePool)(?:\.[a-zA-Z0-9]+)+ |extraEnv: "
)
GROUP = 12
"""Few values at a time beside defaults, so that a third value hides little."""
_DRAWN = re.compile(r"^  (password|access-key|secret-key|tls\.crt|tls\.key): .+$", re.MULTILINE)
_BETWEEN = re.compile(r"^---$", re.MULTILINE)
_VALIDATE = '{{- include "temper.validate" . }}'
_CHECKS = ("_helpers.tpl", "_validate.tpl")


@functools.cache
def _parse(text: str) -> tuple[tuple[str, str], ...]:
    """Kind and name of each object in a document; equal documents are parsed once."""
    return tuple((one["kind"], one["metadata"]["name"]) for one in documents(text))


@dataclass
class Pairs:
    """Tries values together.

    Args:
        values: name → values.
        directory: for copies of the chart.
    """

    values: Mapping[str, Values]
    directory: Path
    renders: int = 0
    contradictions: set[frozenset[str]] = field(default_factory=set)

    def wrong(self) -> dict[tuple[str, ...], str]:
        """Pairs with what is wrong with them, of all pairs of values."""
        names = list(self.values)
        random.Random(1).shuffle(names)
        groups = [names[start : start + GROUP] for start in range(0, len(names), GROUP)]
        found = dict(entry for one, other in itertools.combinations(groups, 2) for entry in self._wrong(one, other))
        for group in groups:
            found |= dict(self._wrong_within(group))
        return found

    def told(self, names: Sequence[str]) -> str | None:
        """What is wrong with these values together; None: they contradict each other, and a value is named."""
        self.renders += 1
        try:
            texts = self._templates.render(self._said(names), name=RELEASE, namespace=NAMESPACE)
        except helm_python.HelmError as error:
            return None if NAMED.search(str(error)) else str(error)
        objects: list[tuple[str, str]] = []
        for path, text in texts.items():
            if path.endswith(".yaml"):
                try:
                    for document in _BETWEEN.split(_DRAWN.sub(r"  \1: drawn", text)):
                        objects += _parse(document)
                except (yaml.YAMLError, TypeError, KeyError) as error:
                    return f"{path}: {error}"
        return "" if len(set(objects)) == len(objects) else "two objects have one name"

    def _wrong_within(self, group: Sequence[str]) -> Iterator[tuple[tuple[str, ...], str]]:
        """The same of every pair of one group."""
        if len(group) > 1 and self.told(group) != "":
            half = len(group) // 2
            yield from self._wrong(group[:half], group[half:])
            yield from self._wrong_within(group[:half])
            yield from self._wrong_within(group[half:])

    def _wrong(self, one: Sequence[str], other: Sequence[str]) -> Iterator[tuple[tuple[str, ...], str]]:
        """Every pair of a value of one group and a value of the other, as many at once as do not contradict."""
        if not one or not other:
            return
        names = (*one, *other)
        pair = next((known for known in self.contradictions if known <= set(names)), None)
        if pair is None:
            problem = self.told(names)
            if problem == "" or (problem is None and len(names) == 2):
                return
            if problem and len(names) == 2:
                yield names, problem
                return
            if problem is None and (pair := self._contradiction(names)) is not None:
                self.contradictions.add(pair)
        if pair is not None:
            # One of the two on its own, and all others without it; between the two there is nothing to try.
            apart = next(name for name in names if name in pair)
            if apart in other:
                one, other = other, one
            yield from self._wrong([name for name in one if name != apart], other)
            yield from self._wrong([apart], [name for name in other if name not in pair])
        elif len(one) >= len(other):
            yield from self._wrong(one[: len(one) // 2], other)
            yield from self._wrong(one[len(one) // 2 :], other)
        else:
            yield from self._wrong(one, other[: len(other) // 2])
            yield from self._wrong(one, other[len(other) // 2 :])

    def _contradiction(self, names: Sequence[str]) -> frozenset[str] | None:
        """Two of these values that the chart's checks refuse together; None: it takes three, or no check says it."""
        if self._agree(names):
            return None
        last = self._first_refused(len(names), lambda count: names[:count])
        first = self._first_refused(last, lambda count: (*names[:count], names[last]))
        if first == last or self._agree([names[first], names[last]]):
            return None
        return frozenset((names[first], names[last]))

    def _first_refused(self, most: int, chosen: Callable[[int], Sequence[str]]) -> int:
        """Index of the value with which the first so many are refused."""
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._agree(chosen(middle)) else (low, middle)
        return high - 1

    def _agree(self, names: Sequence[str]) -> bool:
        try:
            self._checks.render(self._said(names), name=RELEASE, namespace=NAMESPACE)
        except helm_python.HelmError:
            return False
        return True

    def _said(self, names: Sequence[str]) -> dict[str, object]:
        return merged(OURS, QUIET, *(self.values[name] for name in names))

    @functools.cached_property
    def _templates(self) -> helm_python.Chart:
        left_out = shutil.ignore_patterns("dashboards", "README.md", "values.schema.json", "values-*.yaml")
        copy = shutil.copytree(CHART, self.directory / "templates", ignore=left_out)
        # Several templates check, for whoever renders one alone. Here once is enough, and it takes as long as all else.
        for name in ("engine.yaml", "NOTES.txt"):
            file = copy / "templates" / name
            file.write_text(file.read_text().replace(_VALIDATE, "", 1))
        return helm_python.Chart.load(copy)

    @functools.cached_property
    def _checks(self) -> helm_python.Chart:
        """What refuses values, and nothing else."""
        copy = self.directory / "checks"
        (copy / "templates").mkdir(parents=True)
        for name in ("Chart.yaml", "values.yaml", *(f"templates/{name}" for name in _CHECKS)):
            shutil.copy(CHART / name, copy / name)
        (copy / "templates" / "all.yaml").write_text('{{ include "temper.validate" . }}')
        return helm_python.Chart.load(copy)

"""`python -m tests.chart.matrix`: the chart over all combinations of values, every object against every Kubernetes.
`--pairs`: exactly two values at a time, every pair, rendered and parsed."""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.chart.combinations import combinations
from tests.chart.pairs import Pairs
from tests.chart.render import render
from tests.chart.test_pairs import FRAGMENTS
from tests.chart.validation import VERSIONS, problems


def main() -> int:
    """Returns the exit status."""
    if "--pairs" in sys.argv[1:]:
        return _pairs()
    kinds: Counter[str] = Counter()
    failures = 0
    for name, values in combinations().items():
        objects = render(values).objects
        kinds.update(str(obj["kind"]) for obj in objects)
        found = [problem for obj in objects for version in VERSIONS for problem in problems(obj, version)]
        failures += len(found)
        sys.stdout.write(f"{len(objects):>3} objects  {len(found)} problems  {name}\n")
        sys.stdout.writelines(f"    {problem}\n" for problem in dict.fromkeys(found))
    checks = sum(kinds.values()) * len(VERSIONS)
    sys.stdout.write(
        f"\n{len(combinations())} combinations x {len(VERSIONS)} versions of Kubernetes: {checks} checks, "
    )
    sys.stdout.write(f"{failures} problems\n{', '.join(f'{count} {kind}' for kind, count in kinds.most_common())}\n")
    return 1 if failures else 0


def _pairs() -> int:
    with tempfile.TemporaryDirectory() as directory:
        tried = Pairs(FRAGMENTS, Path(directory))
        told = {pair: tried.told(pair) for pair in itertools.combinations(FRAGMENTS, 2)}
    wrong = {pair: problem for pair, problem in told.items() if problem}
    refused = sum(problem is None for problem in told.values())
    sys.stdout.writelines(f"{' + '.join(pair)}: {problem}\n" for pair, problem in wrong.items())
    sys.stdout.write(f"{len(told)} pairs, {refused} refused by name, {len(wrong)} problems\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""`python -m tests.chart.matrix`: the chart over all combinations of values, every object against every Kubernetes."""

from __future__ import annotations

import sys
from collections import Counter

from tests.chart.combinations import combinations
from tests.chart.render import render
from tests.chart.validation import VERSIONS, problems


def main() -> int:
    """Returns the exit status."""
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


if __name__ == "__main__":
    raise SystemExit(main())

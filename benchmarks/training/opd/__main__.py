"""`python -m benchmarks.training.opd`: see benchmarks.training.opd.steps."""

from __future__ import annotations

from benchmarks.training.opd.steps import main

if __name__ == "__main__":
    main()

"""Gates: conditions on suites by which a job's result is published or attached; docs/decisions/gates.md."""

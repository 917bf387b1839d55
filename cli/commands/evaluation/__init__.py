"""`temper eval`: runs, their suites, results of the harness, and the plot of a comparison."""

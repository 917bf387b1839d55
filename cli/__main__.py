"""`python -m cli` is `temper`."""

from cli.main import run

run()

"""A check, and how it is made."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cli.doctor.findings import Checked, Finding, NotHere, Status, failure, skipped
from cli.doctor.place import Place
from cli.output import CliError


@dataclass(frozen=True, slots=True)
class Check:
    """One thing to look at."""

    name: str
    look: Callable[[Place], Finding]
    needs: str = ""
    """Check that comes before; where that one fails or is skipped, there is nothing to look at."""

    @property
    def says(self) -> str:
        """What is so where it is ok: the first sentence of the function's docstring."""
        return " ".join((inspect.getdoc(self.look) or "").split())


def examine(place: Place, checks: Sequence[Check], *, fix: bool = False) -> Iterator[Checked]:
    """Makes the checks one after the other.

    Args:
        fix: mend what can be mended safely, and look again.
    """
    done: dict[str, Finding] = {}
    for check in checks:
        began = time.perf_counter()
        needed = done.get(check.needs)
        if needed is not None and needed.status in (Status.FAILURE, Status.SKIPPED):
            finding, mended = skipped(needed.message), ""
        else:
            finding, mended = _look(check, place), ""
        if fix and finding.mend is not None:
            try:
                mended = finding.mend()
            except Exception as error:
                finding = failure(f"{finding.message}; mending it failed: {error}", finding.way_out)
            else:
                finding = _look(check, place)
        done[check.name] = finding
        yield Checked(check.name, finding, time.perf_counter() - began, mended)


def _look(check: Check, place: Place) -> Finding:
    try:
        return check.look(place)
    except NotHere as error:
        return skipped(str(error))
    except CliError as error:
        return failure(error.message, "correct what it names")
    except Exception as error:  # one check that breaks says so, and the others go on
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return failure(f"the check itself failed ({type(error).__name__}): {reason}", "tell Temper's developers of it")

"""Ends this process when the one that started it is gone, so that a killed `temper up` leaves nothing behind."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def exit_with_parent() -> None:
    """Asks Linux for SIGTERM at the parent's death; elsewhere there is nothing to ask, see `parent_is_gone`."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def parent_is_gone(parent: int) -> bool:
    """Whether ``parent``, a process id taken at start, is not our parent any more."""
    return os.getppid() != parent

"""Levels of recomputation: how much of a forward its backward computes again."""

from __future__ import annotations

from typing import Literal

Recompute = Literal["none", "selective", "full"]
"""Only what is nearly free; also the inside of mixers and the first product of the MLP; or whole layers."""

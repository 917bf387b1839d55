"""Triton kernels run for real where there is a GPU and in Triton's interpreter elsewhere (tests/conftest.py)."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.gpu import interpreter  # noqa: F401


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")

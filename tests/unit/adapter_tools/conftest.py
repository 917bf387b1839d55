from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.training_support import write_checkpoint


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tokenizer_files: dict[str, bytes]) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), tokenizer_files)

from __future__ import annotations

import pytest
import torch

from tests.training_support import TrainingHost, write_checkpoint


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tokenizer_files: dict[str, bytes]) -> object:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), tokenizer_files)


@pytest.fixture
def host(checkpoint: object) -> TrainingHost:
    return TrainingHost(checkpoint)  # type: ignore[arg-type]

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.training_support import TrainingHost
from tests.unit.trainer.training_sessions.office import Office


@pytest.fixture
def office(host: TrainingHost) -> Iterator[Office]:
    made = Office(host)
    yield made
    made.manager.shut_down()

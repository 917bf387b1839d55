"""The rules, one module a group."""

from __future__ import annotations

from observability.alerts.adapters import ADAPTERS
from observability.alerts.canaries import CANARIES
from observability.alerts.learners import LEARNERS
from observability.alerts.platform import PLATFORM
from observability.alerts.serving import SERVING
from observability.alerts.training import TRAINING
from observability.rules import Group

GROUPS: tuple[Group, ...] = (SERVING, TRAINING, LEARNERS, CANARIES, ADAPTERS, PLATFORM)

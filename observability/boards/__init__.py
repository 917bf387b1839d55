"""The dashboards, one module each."""

from __future__ import annotations

from observability.board import Board
from observability.boards.adapters import ADAPTERS
from observability.boards.cluster import CLUSTER
from observability.boards.serving import SERVING
from observability.boards.training import TRAINING

BOARDS: tuple[Board, ...] = (SERVING, TRAINING, ADAPTERS, CLUSTER)

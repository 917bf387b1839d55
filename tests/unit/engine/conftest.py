"""Fixtures of the engine's tests."""

from tests.unit.engine.adapters.adapter_world import world
from tests.unit.engine.loop.loop_fixture import depth, engine

__all__ = ["depth", "engine", "world"]

"""Optimizer of training: AdamW over float32 masters, its moments float32 or bytes."""

from __future__ import annotations

from services.trainer.optimizer.master import MasterOptimizer, ScheduledOptimizer, States, learning_rate

__all__ = ["MasterOptimizer", "ScheduledOptimizer", "States", "learning_rate"]

"""One claimed job, attempted: training with its gates, evaluation, forge."""

"""The engine: schedules, computes and caches token ids on one device."""

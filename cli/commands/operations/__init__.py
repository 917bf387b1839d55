"""Commands that run Temper and look after it: what runs, its logs, its health, its settings."""

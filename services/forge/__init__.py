"""The forge: makes smaller models of a checkpoint by cutting whole units out of it."""

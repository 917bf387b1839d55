"""Who computes when: the engine's steps and the trainer's pieces on one device."""

"""Engine loop: one thread that runs the steps, the only writer of the scheduler."""

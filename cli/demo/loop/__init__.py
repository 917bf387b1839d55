"""`temper demo --loop`: visitors chat and react, and the model learns what they want from nothing else."""

"""`temper demo`: starts everything, lets the model learn, shows what changed."""

"""Episodes: rollouts that act in environments, turn by turn."""

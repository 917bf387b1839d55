"""The prefix cache: multi-turn traffic, restores from tiers, exactness, noise, endurance."""

"""Environments of our own, as servers that speak OpenEnv's protocol: what an agent acts in, and is rewarded by. No
torch."""

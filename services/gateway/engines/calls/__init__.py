"""Calls to engines beside the stream of requests: adapters, rollouts, conversation and training sessions."""

"""Limits of one caller: requests and tokens a minute, requests at a time."""

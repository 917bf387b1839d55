"""Texts for people of what a command found out."""

"""Suspects run one by one, each in a process of its own."""

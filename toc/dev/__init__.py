"""Servers and demo for developers' machines; production imports nothing of it."""

"""Servers and demo for developers' machines; production code imports nothing from here."""

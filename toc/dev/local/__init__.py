"""Servers as private processes on this machine: the embedded default, and those of tests."""

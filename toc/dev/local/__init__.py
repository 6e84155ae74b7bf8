"""Servers as private processes on this machine: the embedded default, the local cluster, the tests."""

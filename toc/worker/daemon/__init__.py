"""The daemon: one on a host, the supervisor of its worker processes."""

"""The daemon: one per host, the supervisor of its worker processes."""

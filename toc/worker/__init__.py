"""The worker daemon and its processes."""

"""Moving over from other delay queues: what their Redis holds becomes tasks."""

"""Moving over from other delay queues: jobs in their Redis become tasks."""

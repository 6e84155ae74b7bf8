"""Services that keep the task table and the index in order. Each is called repeatedly."""

"""The rows of tasks and schedules: what is written, read and found there."""

"""The stages of a worker process: take, check, run, settle, and the loops that guard this path."""

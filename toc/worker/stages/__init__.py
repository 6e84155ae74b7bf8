"""The stages of a worker process: take, check, run, settle, and what keeps that path honest."""

"""Settle: how tries ended is written to rows, then the entries are moved."""

"""Without Redis: how its absence and its losses are noticed, and what runs meanwhile."""

"""Applications of hosts that are not like the others."""

"""Slot ownership: who consumes which slot, and who sweeps which table."""

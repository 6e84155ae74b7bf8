"""Slot ownership: which worker consumes which slot and sweeps which table."""

"""Run: from checked entries to handlers that run, and what keeps their tries alive."""

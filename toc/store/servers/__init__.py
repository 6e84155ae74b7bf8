"""The database servers: how statements reach them, and what follows if they do not."""

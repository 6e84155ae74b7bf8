"""The tables that only the first database has: one row for each topic, template, token, target and action."""

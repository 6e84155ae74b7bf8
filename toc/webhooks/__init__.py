"""Webhooks: tasks that are sent to a URL when they are due."""

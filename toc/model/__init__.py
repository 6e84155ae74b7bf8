"""Nouns and pure decisions: they import nothing of toc but each other."""

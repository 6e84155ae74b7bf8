"""Nouns and pure decisions. Modules here import nothing of toc except each other."""

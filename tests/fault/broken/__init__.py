"""Builds of toc that are wrong on purpose. The checker must see it, else its praise means nothing.

Each module patches what its name says when it is imported: as the app of a daemon, as a program that
submits (``python -m``), or in the test itself. The product has no hooks for any of it.
"""

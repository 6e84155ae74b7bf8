"""The application of workers without handlers: they sweep, purge and reclaim, as every worker does."""

from toc.sdk.client import TimeoutCenter

center = TimeoutCenter()

"""The application of workers without handlers: they sweep, purge and reclaim, as all workers do."""

from toc.sdk.client import TimeoutCenter

center = TimeoutCenter()

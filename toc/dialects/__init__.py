"""Protocols of other delay queues, each on a port of its own: codecs over the use cases of toc."""

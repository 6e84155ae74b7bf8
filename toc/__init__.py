"""toc, a low-latency timeout center."""

"""How toc reports on itself: log, metrics, traces."""

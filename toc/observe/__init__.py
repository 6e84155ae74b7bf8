"""What toc tells about itself: log, metrics, traces."""

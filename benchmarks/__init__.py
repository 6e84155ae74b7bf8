"""toc and its peers: the same workloads on the same machine, one peer at a time (``make bench``)."""

"""Take: which due entries this process takes from the StoreQueue, and when."""

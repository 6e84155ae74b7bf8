"""What applications do with toc."""

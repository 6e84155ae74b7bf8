"""What operators do with toc."""

"""The measured systems, one file each; ``benchmarks.catalog`` has their settings."""

"""The systems that are measured, one file each; how they are set is said in ``benchmarks.catalog``."""

"""Orders on a real stack, each with the outcome that it must have: what `toc demo` runs."""

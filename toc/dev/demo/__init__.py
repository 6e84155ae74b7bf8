"""Order lifecycles on a real stack, with an exact oracle: what `toc demo` runs."""

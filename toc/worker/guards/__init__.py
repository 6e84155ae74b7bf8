"""Guards: what handlers can do to their process, and how it is noticed."""

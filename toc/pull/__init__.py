"""Tasks handed out to consumers that pull them."""

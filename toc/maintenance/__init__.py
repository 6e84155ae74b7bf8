"""What keeps table and index in order: services that are called again and again."""

"""An order service that leaves its deadlines to the timeout center."""

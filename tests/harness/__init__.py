"""What tests of the whole system share: an app whose handlers leave a history, daemons, and the checker."""

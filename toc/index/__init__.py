"""The index: StoreQueue, PrepareQueue and DeadQueue in Redis. The only importer of hiredis."""

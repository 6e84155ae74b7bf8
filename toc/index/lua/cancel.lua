#!lua flags=allow-oom
-- cancel: removes an id from the StoreQueue, and returns whether a worker has it.
--
-- KEYS  1   store     StoreQueue of the slot
--       2   prepare   PrepareQueue of the slot
-- ARGV  1   id
-- RETURNS   {1 if there is a PrepareQueue entry, now in ms}
-- BOUNDS    1 id
local _, now_ms = clock()
local prepared = redis.call('ZSCORE', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[1], ARGV[1])
return {prepared and 1 or 0, now_ms}

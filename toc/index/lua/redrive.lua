#!lua flags=allow-oom
-- redrive: moves ids from the DeadQueue to the StoreQueue. Their rows are already pending again, so an id whose
-- DeadQueue entry was lost is put into the StoreQueue too. An id in the PrepareQueue is only removed from the
-- DeadQueue.
--
-- KEYS  1   store     StoreQueue of the slot
--       2   dead      DeadQueue of the slot
--       3   prepare   PrepareQueue of the slot
-- ARGV  1   channel   wake channel of the slot
--       2+  id, score
-- RETURNS   how many ids left the DeadQueue
-- BOUNDS    500 ids
-- WAKES     when the first score of the StoreQueue became earlier
local ids, places = unprepared(KEYS[3], 2, 2)
if #ids > 0 then
  put(KEYS[1], ARGV[1], 'LT', unpack(scored(ids, places, 1)))
end
return redis.call('ZREM', KEYS[2], unpack(ids_from(2, 2)))

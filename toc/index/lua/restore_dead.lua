#!lua
-- restore_dead: restores the DeadQueue entries of dead tasks, and removes their ids from the StoreQueue.
-- An id in the PrepareQueue is left alone: its worker reads the row and buries it.
--
-- KEYS  1   dead      DeadQueue of the slot
--       2   store     StoreQueue of the slot
--       3   prepare   PrepareQueue of the slot
-- ARGV  1+  id, died_ms
-- RETURNS   how many ids were missing in the DeadQueue
-- BOUNDS    500 ids; refused when memory is full (it adds; the sweep comes again)
local ids, places = unprepared(KEYS[3], 1, 2)
if #ids == 0 then
  return 0
end
local missing = redis.call('ZADD', KEYS[1], 'NX', unpack(scored(ids, places, 1)))
redis.call('ZREM', KEYS[2], unpack(ids))
return missing

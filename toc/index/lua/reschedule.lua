#!lua
-- reschedule: moves an id to another time in the StoreQueue, earlier or later, or adds it there.
-- An id in the PrepareQueue is left alone: its worker finds the row's new time when it finishes.
--
-- KEYS  1   store     StoreQueue of the slot
--       2   prepare   PrepareQueue of the slot
-- ARGV  1   channel   wake channel of the slot
--       2   id
--       3   score
-- RETURNS   {1 if there is a PrepareQueue entry, now in ms}
-- BOUNDS    1 id; refused when memory is full (it may add; an entry that is too early does no harm)
-- WAKES     when the first score of the StoreQueue became earlier
local _, now_ms = clock()
local prepared = redis.call('ZSCORE', KEYS[2], ARGV[2])
if not prepared then -- [rule: prepared-stays]
  put(KEYS[1], ARGV[1], ARGV[3], ARGV[2])
end
return {prepared and 1 or 0, now_ms}

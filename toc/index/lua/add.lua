#!lua
-- add: puts ids into the StoreQueue, or moves them to an earlier time; never to a later one. An id in the
-- PrepareQueue is left alone: a worker has it. The caller may have read the row before the last try failed: the
-- row check puts that right.
--
-- KEYS  1   store     StoreQueue of the slot
--       2   prepare   PrepareQueue of the slot
-- ARGV  1   channel   wake channel of the slot
--       2+  id, score
-- RETURNS   how many ids were added or became earlier
-- BOUNDS    500 ids; refused when memory is full (no allow-oom on purpose)
-- WAKES     when the first score of the StoreQueue became earlier
local ids, places = unprepared(KEYS[2], 2, 2)
if #ids == 0 then
  return 0
end
return put(KEYS[1], ARGV[1], 'LT', 'CH', unpack(scored(ids, places, 1))) -- [rule: never-later]

#!lua flags=allow-oom
-- bury: moves entries that ran out of tries from the PrepareQueue into the DeadQueue.
--
-- KEYS  1   dead      DeadQueue of the slot
--       2   prepare   PrepareQueue of the slot
-- ARGV  1+  id, fence, died_ms
--           fence: score mod 1000; or the whole score, which a keep-alive invalidates
-- RETURNS   per id 1, or 0 if the fence no longer matches
-- BOUNDS    500 ids
local flags, ids, places = fenced(KEYS[2], 1, 3)
if #ids > 0 then
  redis.call('ZADD', KEYS[1], unpack(scored(ids, places, 2)))
  redis.call('ZREM', KEYS[2], unpack(ids))
end
return flags

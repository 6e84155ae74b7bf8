#!lua flags=allow-oom
-- rollback: moves entries from the PrepareQueue back to the StoreQueue, at the caller's score. If the
-- StoreQueue has the id already, the earlier of the two scores stays.
--
-- KEYS  1   store     StoreQueue of the slot
--       2   prepare   PrepareQueue of the slot
-- ARGV  1   channel   wake channel of the slot
--       2+  id, fence, score
--           fence: score mod 1000; or the whole score, which a keep-alive invalidates
-- RETURNS   per id 1, or 0 if the fence no longer matches
-- BOUNDS    500 ids
-- WAKES     when the first score of the StoreQueue became earlier
local flags, ids, places = fenced(KEYS[2], 2, 3)
if #ids > 0 then
  put(KEYS[1], ARGV[1], 'LT', unpack(scored(ids, places, 2))) -- [rule: never-later]
  redis.call('ZREM', KEYS[2], unpack(ids))
end
return flags

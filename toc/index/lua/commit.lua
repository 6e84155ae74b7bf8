#!lua flags=allow-oom
-- commit: removes finished entries from the PrepareQueue.
--
-- KEYS  1   prepare   PrepareQueue of the slot
-- ARGV  1+  id, fence
--           fence: score mod 1000; or the whole score, which a keep-alive invalidates
-- RETURNS   per id 1, or 0 if the fence no longer matches
-- BOUNDS    500 ids
local flags, ids = fenced(KEYS[1], 1, 2)
if #ids > 0 then
  redis.call('ZREM', KEYS[1], unpack(ids))
end
return flags

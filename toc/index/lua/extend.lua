#!lua flags=allow-oom
-- extend: keeps running entries alive: sets only their seconds, to this server's time.
--
-- KEYS  1   prepare   PrepareQueue of the slot
-- ARGV  1+  id, fence
-- RETURNS   per id 1, or 0 if the fence no longer matches
-- BOUNDS    500 ids
local flags, ids, places = fenced(KEYS[1], 1, 2)
local seconds, kept = clock(), scored(ids, places, 1)
for n = 1, #kept, 2 do
  kept[n] = string.format('%.17g', seconds * 1000 + kept[n] % 1000)
end
if #kept > 0 then
  redis.call('ZADD', KEYS[1], 'XX', unpack(kept))
end
return flags

#!lua flags=allow-oom
-- commit: removes finished entries from the PrepareQueue.
--
-- KEYS  1   prepare   PrepareQueue of the slot
-- ARGV  1+  id, fence
-- RETURNS   per id 1, or 0 where the fence no longer stands
-- BOUNDS    500 ids
if #ARGV > 1000 then
  return redis.error_reply('ERR toc: more than 500 ids in one call')
end
local ids = {}
for i = 1, #ARGV, 2 do
  ids[#ids + 1] = ARGV[i]
end
local scores = redis.call('ZMSCORE', KEYS[1], unpack(ids))
local stands, removed = {}, {}
for n = 1, #ids do
  stands[n] = 0
  if scores[n] and tonumber(scores[n]) % 1000 == tonumber(ARGV[2 * n]) then
    stands[n] = 1
    removed[#removed + 1] = ids[n]
  end
end
if #removed > 0 then
  redis.call('ZREM', KEYS[1], unpack(removed))
end
return stands

#!lua flags=allow-oom
-- extend: keeps running entries alive: sets only their seconds, to this server's time.
--
-- KEYS  1   prepare   PrepareQueue of the slot
-- ARGV  1+  id, fence
-- RETURNS   per id 1, or 0 if the fence no longer matches
-- BOUNDS    500 ids
if #ARGV > 1000 then
  return redis.error_reply('ERR toc: more than 500 ids in one call')
end
local ids = {}
for i = 1, #ARGV, 2 do
  ids[#ids + 1] = ARGV[i]
end
local seconds = tonumber(redis.call('TIME')[1])
local scores = redis.call('ZMSCORE', KEYS[1], unpack(ids))
local matched, kept = {}, {}
for n = 1, #ids do
  local fence = tonumber(ARGV[2 * n])
  matched[n] = 0
  if scores[n] and tonumber(scores[n]) % 1000 == fence then
    matched[n] = 1
    kept[#kept + 1] = string.format('%.17g', seconds * 1000 + fence)
    kept[#kept + 1] = ids[n]
  end
end
if #kept > 0 then
  redis.call('ZADD', KEYS[1], 'XX', unpack(kept))
end
return matched

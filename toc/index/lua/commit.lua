#!lua flags=allow-oom
-- commit: removes finished entries from the PrepareQueue.
--
-- KEYS  1   prepare   PrepareQueue of the slot
-- ARGV  1+  id, fence
--           fence: score mod 1000; or the whole score, which a keep-alive invalidates
-- RETURNS   per id 1, or 0 if the fence no longer matches
-- BOUNDS    500 ids
if #ARGV > 1000 then
  return redis.error_reply('ERR toc: more than 500 ids in one call')
end
local ids = {}
for i = 1, #ARGV, 2 do
  ids[#ids + 1] = ARGV[i]
end
local scores = redis.call('ZMSCORE', KEYS[1], unpack(ids))
local matched, removed = {}, {}
for n = 1, #ids do
  matched[n] = 0
  local score, fence = scores[n] and tonumber(scores[n]), tonumber(ARGV[2 * n])
  if score and (score % 1000 == fence or score == fence) then -- [rule: queue-fence]
    matched[n] = 1
    removed[#removed + 1] = ids[n]
  end
end
if #removed > 0 then
  redis.call('ZREM', KEYS[1], unpack(removed))
end
return matched

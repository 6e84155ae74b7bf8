#!lua flags=allow-oom
-- bury: moves entries that ran out of tries from the PrepareQueue into the DeadQueue.
--
-- KEYS  1   dead      DeadQueue of the slot
--       2   prepare   PrepareQueue of the slot
-- ARGV  1+  id, fence, died_ms
--           fence: score mod 1000; or the whole score, which a keep-alive invalidates
-- RETURNS   per id 1, or 0 if the fence no longer matches
-- BOUNDS    500 ids
if #ARGV > 1500 then
  return redis.error_reply('ERR toc: more than 500 ids in one call')
end
local ids = {}
for i = 1, #ARGV, 3 do
  ids[#ids + 1] = ARGV[i]
end
local scores = redis.call('ZMSCORE', KEYS[2], unpack(ids))
local matched, added, removed = {}, {}, {}
for n = 1, #ids do
  matched[n] = 0
  local score, fence = scores[n] and tonumber(scores[n]), tonumber(ARGV[3 * n - 1])
  if score and (score % 1000 == fence or score == fence) then -- [rule: queue-fence]
    matched[n] = 1
    added[#added + 1] = ARGV[3 * n]
    added[#added + 1] = ids[n]
    removed[#removed + 1] = ids[n]
  end
end
if #removed > 0 then
  redis.call('ZADD', KEYS[1], unpack(added))
  redis.call('ZREM', KEYS[2], unpack(removed))
end
return matched

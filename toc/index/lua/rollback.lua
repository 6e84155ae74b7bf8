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
if #ARGV > 1501 then
  return redis.error_reply('ERR toc: more than 500 ids in one call')
end
local ids = {}
for i = 2, #ARGV, 3 do
  ids[#ids + 1] = ARGV[i]
end
local scores = redis.call('ZMSCORE', KEYS[2], unpack(ids))
local matched, added, removed = {}, {}, {}
for n = 1, #ids do
  matched[n] = 0
  local score, fence = scores[n] and tonumber(scores[n]), tonumber(ARGV[3 * n])
  if score and (score % 1000 == fence or score == fence) then -- [rule: queue-fence]
    matched[n] = 1
    added[#added + 1] = ARGV[3 * n + 1]
    added[#added + 1] = ids[n]
    removed[#removed + 1] = ids[n]
  end
end
if #removed > 0 then
  local before = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
  redis.call('ZADD', KEYS[1], 'LT', unpack(added)) -- [rule: never-later]
  redis.call('ZREM', KEYS[2], unpack(removed))
  local first = tonumber(redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2])
  if not before or first < tonumber(before) then
    redis.pcall('PUBLISH', ARGV[1], string.format('%.17g', first))
  end
end
return matched

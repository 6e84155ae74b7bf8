#!lua flags=allow-oom
-- redrive: moves ids from the DeadQueue to the StoreQueue. Their rows are already pending again, so an id whose
-- DeadQueue entry was lost is put into the StoreQueue too. An id in the PrepareQueue is only removed from the
-- DeadQueue.
--
-- KEYS  1   store     StoreQueue of the slot
--       2   dead      DeadQueue of the slot
--       3   prepare   PrepareQueue of the slot
-- ARGV  1   channel   wake channel of the slot
--       2+  id, score
-- RETURNS   how many ids left the DeadQueue
-- BOUNDS    500 ids
-- WAKES     when the first score of the StoreQueue became earlier
if #ARGV > 1001 then
  return redis.error_reply('ERR toc: more than 500 ids in one call')
end
local ids = {}
for i = 2, #ARGV, 2 do
  ids[#ids + 1] = ARGV[i]
end
local prepared = redis.call('ZMSCORE', KEYS[3], unpack(ids))
local added = {}
for n = 1, #ids do
  if not prepared[n] then -- [rule: prepared-stays]
    added[#added + 1] = ARGV[2 * n + 1]
    added[#added + 1] = ids[n]
  end
end
if #added > 0 then
  local before = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
  redis.call('ZADD', KEYS[1], 'LT', unpack(added))
  local first = tonumber(redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2])
  if not before or first < tonumber(before) then
    redis.pcall('PUBLISH', ARGV[1], string.format('%.17g', first))
  end
end
return redis.call('ZREM', KEYS[2], unpack(ids))

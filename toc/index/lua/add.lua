#!lua
-- add: puts ids into the StoreQueue, or moves them to an earlier time; never to a later one. An id in the
-- PrepareQueue is left alone: a worker has it. An id that the StoreQueue has with fewer tries left than given
-- keeps these, because the caller may have read the row before the last try failed.
--
-- KEYS  1   store     StoreQueue of the slot
--       2   prepare   PrepareQueue of the slot
-- ARGV  1   channel   wake channel of the slot
--       2+  id, score; none to learn whether memory is full
-- RETURNS   how many ids were added or became earlier
-- BOUNDS    500 ids; refused when memory is full (no allow-oom on purpose)
-- WAKES     when the first score of the StoreQueue became earlier
if #ARGV > 1001 then
  return redis.error_reply('ERR toc: more than 500 ids in one call')
end
local ids = {}
for i = 2, #ARGV, 2 do
  ids[#ids + 1] = ARGV[i]
end
if #ids == 0 then
  return 0
end
local function kept(standing, score)
  local old, new = tonumber(standing), tonumber(score)
  local tries, given = old - math.floor(old), new - math.floor(new)
  if new < old and tries > 0 and (given == 0 or tries < given) then
    return string.format('%.17g', math.floor(new) + tries)
  end
  return score
end
local prepared = redis.call('ZMSCORE', KEYS[2], unpack(ids))
local standing = redis.call('ZMSCORE', KEYS[1], unpack(ids))
local added = {}
for n = 1, #ids do
  if not prepared[n] then -- [rule: prepared-stays]
    local score = ARGV[2 * n + 1]
    added[#added + 1] = standing[n] and kept(standing[n], score) or score
    added[#added + 1] = ids[n]
  end
end
if #added == 0 then
  return 0
end
local before = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
local changed = redis.call('ZADD', KEYS[1], 'LT', 'CH', unpack(added)) -- [rule: never-later]
local first = tonumber(redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2])
if not before or first < tonumber(before) then
  redis.pcall('PUBLISH', ARGV[1], string.format('%.17g', first))
end
return changed

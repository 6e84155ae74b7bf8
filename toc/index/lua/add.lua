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
if #ARGV == 1 then
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
local ids, places = unprepared(KEYS[2], 2, 2)
if #ids == 0 then
  return 0
end
local added = scored(ids, places, 1)
local standing = redis.call('ZMSCORE', KEYS[1], unpack(ids))
for n = 1, #ids do
  added[2 * n - 1] = standing[n] and kept(standing[n], added[2 * n - 1]) or added[2 * n - 1]
end
return put(KEYS[1], ARGV[1], 'LT', 'CH', unpack(added)) -- [rule: never-later]

#!lua flags=allow-oom
-- trim: removes the farthest entries of the StoreQueue, those due after a time. What is due within 30 s stays. The
-- PrepareQueue and the DeadQueue are not touched.
--
-- KEYS  1   store     StoreQueue of the slot
-- ARGV  1   after     ms; what is due later goes, farthest first
--       2   limit     remove at most this many
-- RETURNS   how many were removed
-- BOUNDS    limit counts as 500 at most
local seconds, limit = clock(), math.min(tonumber(ARGV[2]), 500)
local after = math.max(tonumber(ARGV[1]), (seconds + 30) * 1000)
local ids = redis.call(
  'ZRANGE', KEYS[1], '+inf', '(' .. string.format('%.17g', after), 'BYSCORE', 'REV', 'LIMIT', 0, limit)
if #ids > 0 then
  redis.call('ZREM', KEYS[1], unpack(ids))
end
return #ids

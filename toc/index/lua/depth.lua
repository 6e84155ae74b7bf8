#!lua flags=no-writes
-- depth: counts the entries of the slot, and those that are due. Moves nothing.
--
-- KEYS  1   store     StoreQueue of the slot
--       2   prepare   PrepareQueue of the slot
--       3   dead      DeadQueue of the slot
-- ARGV  none
-- RETURNS   {first score of the StoreQueue or nil, entries in store, those due, in prepare, in dead, now in ms}
-- BOUNDS    logarithmic in the length of the StoreQueue
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
return {
  first and string.format('%.17g', tonumber(first)) or false,
  redis.call('ZCARD', KEYS[1]),
  redis.call('ZCOUNT', KEYS[1], '-inf', '(' .. string.format('%.17g', now_ms + 1)),
  redis.call('ZCARD', KEYS[2]),
  redis.call('ZCARD', KEYS[3]),
  now_ms
}

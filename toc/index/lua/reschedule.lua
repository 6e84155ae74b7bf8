#!lua
-- reschedule: moves an id to another time in the StoreQueue, earlier or later, or adds it there.
-- An id in the PrepareQueue is left alone: its worker finds the row's new time when it finishes.
--
-- KEYS  1   store     StoreQueue of the slot
--       2   prepare   PrepareQueue of the slot
-- ARGV  1   channel   wake channel of the slot
--       2   id
--       3   score
-- RETURNS   {1 if there was a StoreQueue entry, 1 if there is a PrepareQueue entry, now in ms}
-- BOUNDS    1 id; refused when memory is full (it may add; an entry that is too early does no harm)
-- WAKES     when the first score of the StoreQueue became earlier
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local stood = redis.call('ZSCORE', KEYS[1], ARGV[2])
local prepared = redis.call('ZSCORE', KEYS[2], ARGV[2])
if not prepared then -- [rule: prepared-stays]
  local before = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
  redis.call('ZADD', KEYS[1], ARGV[3], ARGV[2])
  local first = tonumber(redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2])
  if not before or first < tonumber(before) then
    redis.pcall('PUBLISH', ARGV[1], string.format('%.17g', first))
  end
end
return {stood and 1 or 0, prepared and 1 or 0, now_ms}

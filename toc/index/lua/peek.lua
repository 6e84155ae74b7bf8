#!lua flags=no-writes
-- peek: returns when slots are next due, and counts their entries. Moves nothing.
--
-- KEYS  1+  store, prepare, dead   of each slot: its three queues
-- ARGV  none
-- RETURNS   {now in ms, then per slot: first score of the StoreQueue or nil, entries in store, prepare, dead, and
--           those in store that are due}
-- BOUNDS    500 slots
bounded(#KEYS, 3)
local _, now_ms = clock()
local upto = '(' .. string.format('%.17g', now_ms + 1)
local reply = {now_ms}
for i = 1, #KEYS, 3 do
  local first = redis.call('ZRANGE', KEYS[i], 0, 0, 'WITHSCORES')[2]
  reply[#reply + 1] = first and string.format('%.17g', tonumber(first)) or false
  reply[#reply + 1] = redis.call('ZCARD', KEYS[i])
  reply[#reply + 1] = redis.call('ZCARD', KEYS[i + 1])
  reply[#reply + 1] = redis.call('ZCARD', KEYS[i + 2])
  reply[#reply + 1] = first and tonumber(first) < now_ms + 1 and redis.call('ZCOUNT', KEYS[i], '-inf', upto) or 0
end
return reply

#!lua flags=no-writes
-- peek: returns when slots are next due, and counts their entries. Moves nothing.
--
-- KEYS  1+  store, prepare, dead, waiting   of each slot: its three queues, and the note of what waits
-- ARGV  none
-- RETURNS   {now in ms, then per slot: first score of the StoreQueue or nil, entries in store, prepare, dead,
--           the note or nil}
-- BOUNDS    500 slots
if #KEYS > 2000 then
  return redis.error_reply('ERR toc: more than 500 slots in one call')
end
local function note(key)  -- nil if the key has another type
  local found = redis.pcall('GET', key)
  return type(found) == 'string' and found or false
end

local time = redis.call('TIME')
local reply = {tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)}
for i = 1, #KEYS, 4 do
  local first = redis.call('ZRANGE', KEYS[i], 0, 0, 'WITHSCORES')[2]
  reply[#reply + 1] = first and string.format('%.17g', tonumber(first)) or false
  reply[#reply + 1] = redis.call('ZCARD', KEYS[i])
  reply[#reply + 1] = redis.call('ZCARD', KEYS[i + 1])
  reply[#reply + 1] = redis.call('ZCARD', KEYS[i + 2])
  reply[#reply + 1] = note(KEYS[i + 3])
end
return reply

#!lua flags=no-writes
-- expired: lists entries of the PrepareQueue that were not kept alive, oldest first. Moves nothing.
--
-- KEYS  1   prepare   PrepareQueue of the slot
-- ARGV  1   timeout   seconds; expired when now_seconds - seconds > timeout, by this server's clock
--       2   limit     list at most this many
-- RETURNS   {id, prepare score, id, prepare score, ...}
-- BOUNDS    limit is at most 500
local limit = tonumber(ARGV[2])
if limit > 500 then
  return redis.error_reply('ERR toc: more than 500 ids in one call')
end
local oldest = (tonumber(redis.call('TIME')[1]) - tonumber(ARGV[1])) * 1000
local before = '(' .. string.format('%.17g', oldest)
return redis.call('ZRANGE', KEYS[1], '-inf', before, 'BYSCORE', 'LIMIT', 0, limit, 'WITHSCORES')

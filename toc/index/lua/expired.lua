#!lua flags=allow-oom
-- expired: lists entries of the PrepareQueue that were not kept alive, oldest first. Moves nothing.
-- Seconds in the future were written before this server's clock was set back, and become now, as if their worker
-- had just kept the entry alive. A score that is no time at all is listed: its reader removes it.
--
-- KEYS  1   prepare   PrepareQueue of the slot
-- ARGV  1   timeout   seconds; expired when now_seconds - seconds > timeout, by this server's clock
--       2   limit     list at most this many
--       3   skip      leave out this many of the oldest
-- RETURNS   {id, prepare score, id, prepare score, ...}
-- BOUNDS    limit counts as 500 at most; and 50 entries of the future
local seconds, limit = clock(), math.min(tonumber(ARGV[2]), 500)
local before = '(' .. string.format('%.17g', (seconds - tonumber(ARGV[1])) * 1000)
local listed = redis.call('ZRANGE', KEYS[1], '-inf', before, 'BYSCORE', 'LIMIT', ARGV[3], limit, 'WITHSCORES')
local after = string.format('%.17g', (seconds + 2) * 1000)  -- after a failover the clock may be a little behind
local future = redis.call('ZRANGE', KEYS[1], after, '+inf', 'BYSCORE', 'LIMIT', 0, 50, 'WITHSCORES')
for i = 1, #future, 2 do
  local score = tonumber(future[i + 1])
  if score < 2 ^ 53 then
    redis.call('ZADD', KEYS[1], 'XX', string.format('%.17g', seconds * 1000 + score % 1000), future[i])
  else
    listed[#listed + 1] = future[i]
    listed[#listed + 1] = future[i + 1]
  end
end
return listed

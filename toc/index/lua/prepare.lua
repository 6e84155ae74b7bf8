#!lua flags=allow-oom
-- prepare: moves due entries from the StoreQueue into the PrepareQueue, soonest first.
-- This server's clock decides what is due: a score t + r/32 is due at t. A whole score means that the topic's
-- tries are left, any other that r are left. An id that is in the PrepareQueue already keeps its entry
-- there; its entry in the StoreQueue is dropped and not returned.
--
-- KEYS  1   store     StoreQueue of the slot
--       2   prepare   PrepareQueue of the slot
-- ARGV  1   limit     take at most this many
--       2   retries   the topic's tries, 1..31
--       3   claim     number under which the caller holds the slot, 0..4095
--       4   latest    take nothing that came due later (ms)
-- RETURNS   {{id, prepare score, id, prepare score, ...}, first score left in the StoreQueue or nil,
--            how many due entries are left, now in ms}
-- BOUNDS    limit counts as 500 at most
local limit, retries = math.min(tonumber(ARGV[1]), 500), tonumber(ARGV[2])
local claim, latest = tonumber(ARGV[3]), tonumber(ARGV[4])
local seconds, now_ms = clock()
local before = '(' .. string.format('%.17g', now_ms + 1)
local upto = '(' .. string.format('%.17g', math.min(now_ms, latest) + 1)
local due = redis.call('ZRANGE', KEYS[1], '-inf', upto, 'BYSCORE', 'LIMIT', 0, limit, 'WITHSCORES')
local taken = {}
if #due > 0 then
  local ids = {}
  for i = 1, #due, 2 do
    ids[#ids + 1] = due[i]
  end
  local prepared = redis.call('ZMSCORE', KEYS[2], unpack(ids))
  local moved = {}
  local scores = {} -- by tries left: most ids have the same, and formatting a number is slow
  for n = 1, #ids do
    if not prepared[n] then -- [rule: prepared-stays]
      local score = tonumber(due[2 * n])
      local remaining = math.floor((score - math.floor(score)) * 32 + 0.5)
      if remaining == 0 or remaining ~= remaining then -- the second: the score is -inf
        remaining = retries
      end
      local entry = scores[remaining]
      if not entry then
        entry = string.format('%.17g', seconds * 1000 + remaining + claim / 4096)
        scores[remaining] = entry
      end
      moved[#moved + 1] = entry
      moved[#moved + 1] = ids[n]
      taken[#taken + 1] = ids[n]
      taken[#taken + 1] = entry
    end
  end
  if #moved > 0 then
    redis.call('ZADD', KEYS[2], 'NX', unpack(moved))
  end
  redis.call('ZREM', KEYS[1], unpack(ids))
end
local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
local left = 0
if first and tonumber(first) < now_ms + 1 then
  left = redis.call('ZCOUNT', KEYS[1], '-inf', before)
end
return {taken, first and string.format('%.17g', tonumber(first)) or false, left, now_ms}

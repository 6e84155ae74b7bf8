#!lua flags=no-writes
-- held: lists entries of the PrepareQueue that were taken under certain claim numbers. Moves nothing. This is
-- one step of a ZSCAN. No entry that exists from the first step to the last is missed, even if its score
-- changes; some may be listed twice.
--
-- KEYS  1   prepare   PrepareQueue of the slot
-- ARGV  1   cursor    0, then what the last step returned
--       2+  claim
-- RETURNS   {next cursor ('0' when done), {id, prepare score, id, prepare score, ...}}
-- BOUNDS    looks at about 500 entries
local wanted = {}
for i = 2, #ARGV, 1 do
  wanted[tonumber(ARGV[i])] = true
end
local step = redis.call('ZSCAN', KEYS[1], ARGV[1], 'COUNT', 500)
local seen, held = step[2], {}
for i = 1, #seen, 2 do
  local score = tonumber(seen[i + 1])
  if wanted[(score - math.floor(score)) * 4096] then
    held[#held + 1] = seen[i]
    held[#held + 1] = string.format('%.17g', score)
  end
end
return {step[1], held}

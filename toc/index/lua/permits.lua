#!lua flags=allow-oom
-- permits: shares a limit on requests in flight, and one on requests a second, among the processes that ask.
-- A process has what it was granted until `life` has passed since it last asked. While more is wanted than
-- the limit, each process may have an equal share, as far as the others leave it. Requests that it still has
-- in flight beyond its share count as its own until they have ended. If there are more processes than the
-- limit has places, a process that has a place gives it up as soon as it asks and another one wants it.
-- An instant that lies further ahead than it can have been written was written before this server's clock was
-- set back, and counts as if it were written now.
--
-- KEYS  1   permits   the shares: lines 'holder granted wanted until', ms by this server's clock; and a
--                     line '. tokens at': requests that may begin, and when they were counted
-- ARGV  1   holder    who asks
--       2   limit     of all together
--       3   held      how many it uses now
--       4   wanted    how many it could use
--       5   life      ms
--       6   rate      requests a second; 0: no limit
--       7   burst     most requests at one instant, if there is a rate
--       8   asked     how many requests it wants to begin now
-- RETURNS   {granted, requests that it may begin, ms until the next one may, processes that ask}
-- BOUNDS    1 key with a line for each process
local limit, held, wanted, life = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local rate, burst, asked = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local _, now = clock()
local lines, taken, wishes, holders, tokens, at = {}, 0, 0, 1, burst, now
local had, hungry = 0, false
for line in string.gmatch(redis.call('GET', KEYS[1]) or '', '[^\n]+') do
  local who, first, second, third = string.match(line, '^(%S+) (%S+) (%S+) ?(%S*)$')
  if who == '.' then
    tokens, at = tonumber(first) or burst, tonumber(second) or now
  elseif who and who ~= ARGV[1] and (tonumber(third) or 0) > now then
    if tonumber(third) > now + life then
      line = string.format('%s %s %s %d', who, first, second, now + life)
    end
    lines[#lines + 1] = line
    taken, holders = taken + tonumber(first), holders + 1
    wishes = wishes + math.max(tonumber(first), tonumber(second))
    hungry = hungry or (tonumber(first) == 0 and tonumber(second) > 0)
  elseif who == ARGV[1] and (tonumber(third) or 0) > now then
    had = tonumber(first) or 0
  end
end
local granted = wanted
if wishes + wanted > limit then
  granted = math.min(wanted, math.max(math.floor(limit / holders), limit - wishes, 1))
end
granted = math.max(math.min(granted, limit - taken), 0)
if hungry and had > 0 and limit < holders then
  granted = 0
end
local kept = math.max(granted, held)
if kept > 0 or wanted > 0 then
  lines[#lines + 1] = string.format('%s %d %d %d', ARGV[1], kept, wanted, now + life)
end
local begin, pause = 0, 0
if rate > 0 then
  tokens = math.min(burst, tokens + math.max(now - at, 0) * rate / 1000)
  begin = math.min(asked, math.floor(tokens))
  tokens = tokens - begin
  if tokens < 1 then
    pause = math.ceil((1 - tokens) * 1000 / rate)
  end
  lines[#lines + 1] = string.format('. %.17g %d', tokens, now)
  life = math.max(life, math.ceil(burst * 1000 / rate))
end
redis.call('SET', KEYS[1], table.concat(lines, '\n'), 'PX', string.format('%d', life + 1000))
return {granted, begin, pause, holders}

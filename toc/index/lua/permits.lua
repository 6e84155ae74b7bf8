#!lua flags=allow-oom
-- permits: shares a limit on requests in flight, and one on requests a second, among the processes that ask.
-- A process has what it was granted until `life` has passed since it last asked. While more is wanted than
-- the limit, each process may have an equal share, as far as the others leave it. Requests that it still has
-- in flight beyond its share count as its own until they have ended. If there are more processes than the
-- limit has places, a process that has a place gives it up as soon as it asks and another one wants it.
-- An instant that lies further ahead than it can have been written was written before this server's clock was
-- set back, and counts as if it were written now.
-- The script also keeps the target's breaker. Of the eras that processes report, the latest holds. One
-- process gets the probe, and keeps it for `life` after it last asked for it.
--
-- KEYS  1   permits   the shares: lines 'holder granted wanted until', ms by this server's clock; and a first
--                     line '. tokens at': requests that may begin, and when they were counted; and a line
--                     '! era opened until probe probing': the breaker, who has the probe ('-': nobody), until
--                     when
-- ARGV  1   holder    who asks
--       2   limit     of all together
--       3   held      how many it uses now
--       4   wanted    how many it could use
--       5   life      ms
--       6   rate      requests a second; 0: no limit
--       7   burst     most requests at one instant, if there is a rate
--       8   asked     how many requests it wants to begin now
--       9   era       of the breaker as it knows it
--      10   opened    how often in a row that was opened; 0: it is closed
--      11   left      ms for which it is open
--      12   probe     1: it wants to send the probe, or is sending it
-- RETURNS   {granted, requests that it may begin, ms until the next one may, processes that ask, era, opened,
--           left, probe: 1 it is its, 2 another one's}
-- BOUNDS    1 key with a line for each process
local limit, held, wanted, life = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local rate, burst, asked = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local lines, taken, wishes, holders, tokens, at = {}, 0, 0, 1, burst, now
local had, hungry = 0, false
local era, opened, open_until, probe, probing = 0, 0, 0, '-', 0
for line in string.gmatch(redis.call('GET', KEYS[1]) or '', '[^\n]+') do
  local who, first, second, third = string.match(line, '^(%S+) (%S+) (%S+) ?(%S*)$')
  local one, two, three, four, five = string.match(line, '^! (%d+) (%d+) (%d+) (%S+) (%d+)$')
  if one then
    era, opened, open_until = tonumber(one), tonumber(two), tonumber(three)
    open_until = math.min(open_until, now + 60000)  -- the longest time for which a breaker opens
    probe, probing = four, math.min(tonumber(five), now + life)
  elseif who == '.' then
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
local expiry = life + 1000
if tonumber(ARGV[9]) > era then
  era, opened, open_until, probe = tonumber(ARGV[9]), tonumber(ARGV[10]), now + tonumber(ARGV[11]), '-'
end
if opened == 0 or probing <= now or (probe == ARGV[1] and ARGV[12] ~= '1') then
  probe = '-'
end
local given = 0
if probe ~= '-' and probe ~= ARGV[1] then
  given = 2
elseif opened > 0 and open_until <= now and ARGV[12] == '1' then
  given, probe, probing = 1, ARGV[1], now + tonumber(ARGV[5])
end
local left = opened > 0 and math.max(open_until - now, 0) or 0
if era > 0 then
  lines[#lines + 1] = string.format('! %d %d %d %s %d', era, opened, open_until, probe, probing)
  expiry = expiry + left + 600000  -- for as long as a process that has nothing to send remembers the breaker
end
redis.call('SET', KEYS[1], table.concat(lines, '\n'), 'PX', string.format('%d', expiry))
return {granted, begin, pause, holders, era, opened, left, given}

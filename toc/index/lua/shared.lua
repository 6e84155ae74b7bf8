-- shared: what several scripts do. It stands before each of them, so KEYS and ARGV are theirs.

-- Refuses a call with more than 500 groups of `each` words.
local function bounded(words, each)
  if words > 500 * each then
    error(redis.error_reply('ERR toc: more than 500 in one call'))
  end
end

-- This server's time: whole seconds, and ms.
local function clock()
  local time = redis.call('TIME')
  local seconds = tonumber(time[1])
  return seconds, seconds * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- The ids in ARGV: from `first` on, the first of each `step` words.
local function ids_from(first, step)
  bounded(#ARGV - first + 1, step)
  local ids = {}
  for i = first, #ARGV, step do
    ids[#ids + 1] = ARGV[i]
  end
  return ids
end

-- Which groups (id, fence, ...) in ARGV have their fence in the PrepareQueue: a flag for each; the ids of those
-- that do, and where in ARGV these are.
local function fenced(queue, first, step)
  local ids = ids_from(first, step)
  local scores = redis.call('ZMSCORE', queue, unpack(ids))
  local flags, matched, places = {}, {}, {}
  for n = 1, #ids do
    local place = first + step * (n - 1)
    local score, fence = scores[n] and tonumber(scores[n]), tonumber(ARGV[place + 1])
    flags[n] = 0
    if score and (score % 1000 == fence or score == fence) then -- [rule: queue-fence]
      flags[n] = 1
      matched[#matched + 1], places[#places + 1] = ids[n], place
    end
  end
  return flags, matched, places
end

-- The ids in ARGV that are not in the PrepareQueue, and where in ARGV these are.
local function unprepared(queue, first, step)
  local ids = ids_from(first, step)
  local prepared = redis.call('ZMSCORE', queue, unpack(ids))
  local free, places = {}, {}
  for n = 1, #ids do
    if not prepared[n] then -- [rule: prepared-stays]
      free[#free + 1], places[#places + 1] = ids[n], first + step * (n - 1)
    end
  end
  return free, places
end

-- The words of a ZADD: each id after the score that stands so far behind it in ARGV.
local function scored(ids, places, behind)
  local words = {}
  for n = 1, #ids do
    words[2 * n - 1], words[2 * n] = ARGV[places[n] + behind], ids[n]
  end
  return words
end

-- A ZADD to the StoreQueue, and a wake-up when its first score became earlier.
local function put(queue, channel, ...)
  local before = redis.call('ZRANGE', queue, 0, 0, 'WITHSCORES')[2]
  local changed = redis.call('ZADD', queue, ...)
  local first = tonumber(redis.call('ZRANGE', queue, 0, 0, 'WITHSCORES')[2])
  if not before or first < tonumber(before) then
    redis.pcall('PUBLISH', channel, string.format('%.17g', first))
  end
  return changed
end

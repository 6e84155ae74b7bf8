#!lua flags=allow-oom
-- own: claims the index for a task table. The first table whose workers ask owns it for as long as they keep
-- asking. A rival that asks leaves its name, so that the owner learns of it; a new owner finds no rival.
-- A time in the future was written before this server's clock was set back, and counts as now.
--
-- KEYS  1   owner      hash: identity, name, at; rival, rival_at; seconds by this server's clock
-- ARGV  1   identity   of the task table that asks
--       2   name       of its cluster, for people
--       3   lapse      seconds without asking after which the owner loses it
--       4   refresh    seconds after which the owner's asking is recorded again
-- RETURNS   {identity of the owner, its name, seconds since it asked, name of the last rival or '', seconds since}
-- BOUNDS    1 key
local now = tonumber(redis.call('TIME')[1])
local held = redis.call('HGETALL', KEYS[1])
local found = {}
for i = 1, #held, 2 do
  found[held[i]] = held[i + 1]
end
local stamp = string.format('%d', now)
for _, field in ipairs({'at', 'rival_at'}) do
  if (tonumber(found[field]) or 0) > now then
    redis.call('HSET', KEYS[1], field, stamp)
    found[field] = stamp
  end
end
local function since(field)
  local at = tonumber(found[field])
  return at and at <= now and now - at or 0
end
if found.identity and found.identity ~= ARGV[1] and since('at') <= tonumber(ARGV[3]) then
  redis.call('HSET', KEYS[1], 'rival', ARGV[2], 'rival_at', stamp)
elseif found.identity ~= ARGV[1] or found.name ~= ARGV[2] or since('at') >= tonumber(ARGV[4]) then
  if found.identity ~= ARGV[1] then
    redis.call('HDEL', KEYS[1], 'rival', 'rival_at')
    found.rival, found.rival_at = nil, nil
  end
  redis.call('HSET', KEYS[1], 'identity', ARGV[1], 'name', ARGV[2], 'at', stamp)
  found.identity, found.name, found.at = ARGV[1], ARGV[2], stamp
end
return {found.identity, found.name, since('at'), found.rival or '', since('rival_at')}

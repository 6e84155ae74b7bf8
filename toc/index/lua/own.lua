#!lua flags=allow-oom
-- own: claims the index for a task table. The first table whose workers ask owns it for as long as they keep
-- asking. A time in the future was written before this server's clock was set back, and counts as now.
-- Each worker of the owner is a member from its first call on until it leaves, or has not called for an hour.
--
-- KEYS  1   owner      hash: identity, name, at; 'member ' worker_id -> when it called last; seconds by this
--                      server's clock
-- ARGV  1   identity   of the task table that asks; '': it claims nothing, and learns who owns the index
--       2   name       of its cluster, for people
--       3   lapse      seconds without asking after which the owner loses it
--       4   refresh    seconds after which the owner's asking is recorded again
--       5   member     the field of the calling worker, or ''
--       6   leaves     1 if the caller ends, else 0
-- RETURNS   {identity of the owner or '', its name, seconds since it asked,
--           {worker_id, seconds since it called, ... of the members}}
-- BOUNDS    1 key
local seconds = clock()
local fields = redis.call('HGETALL', KEYS[1])
local found = {}
for i = 1, #fields, 2 do
  found[fields[i]] = fields[i + 1]
end
local stamp = string.format('%d', seconds)
if (tonumber(found.at) or 0) > seconds then
  redis.call('HSET', KEYS[1], 'at', stamp)
  found.at = stamp
end
local function since(field)
  local at = tonumber(found[field])
  return at and at <= seconds and seconds - at or 0
end
local held = found.identity and found.identity ~= ARGV[1] and since('at') <= tonumber(ARGV[3])
if ARGV[1] == '' then
  found.identity = found.identity or ''
elseif not held and (found.identity ~= ARGV[1] or found.name ~= ARGV[2] or since('at') >= tonumber(ARGV[4])) then
  if found.identity ~= ARGV[1] then
    for field in pairs(found) do
      redis.call('HDEL', KEYS[1], field)
    end
    found = {}
  end
  redis.call('HSET', KEYS[1], 'identity', ARGV[1], 'name', ARGV[2], 'at', stamp)
  found.identity, found.name, found.at = ARGV[1], ARGV[2], stamp
end
local members = {}
if found.identity == ARGV[1] and ARGV[5] ~= '' then
  if ARGV[6] == '0' then
    redis.call('HSET', KEYS[1], ARGV[5], stamp)
    found[ARGV[5]] = stamp
  else
    redis.call('HDEL', KEYS[1], ARGV[5])
    found[ARGV[5]] = nil
  end
end
for field in pairs(found) do
  local member = string.match(field, '^member (.+)$')
  if member and since(field) > 3600 then
    redis.call('HDEL', KEYS[1], field)
  elseif member then
    members[#members + 1] = member
    members[#members + 1] = since(field)
  end
end
return {found.identity, found.name or '', since('at'), members}

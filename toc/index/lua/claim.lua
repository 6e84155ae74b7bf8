#!lua flags=allow-oom
-- claim: draws the number under which a worker takes entries of the slot. A worker that holds a number gets it
-- again. Numbers that others hold are skipped. Fields that are not numbers are left alone.
--
-- KEYS  1   claims    hash of the slot: next -> the counter, number -> worker_id
-- ARGV  1   worker_id
--       2   start     where a missing counter begins (the caller's random number: after a loss of the
--                     hash, numbers of live workers are not drawn again)
-- RETURNS   {number 0..4095 or -1 when all are held, {number, worker_id, ... of the others}}
-- BOUNDS    4096 fields
local function number(text)
  return string.match(text, '^%d%d?%d?%d?$') and tonumber(text)
end
local held = redis.call('HGETALL', KEYS[1])
local owner, others, count, counter, mine = {}, {}, 0, tonumber(ARGV[2]), nil
for i = 1, #held, 2 do
  if held[i] == 'next' then
    counter = number(held[i + 1]) or counter
  elseif number(held[i]) and held[i + 1] == ARGV[1] then
    mine = number(held[i])
  elseif number(held[i]) then
    owner[number(held[i])] = true
    count = count + 1
    others[#others + 1] = held[i]
    others[#others + 1] = held[i + 1]
  end
end
if not mine then
  if count >= 4096 then
    return {-1, others}
  end
  mine = counter % 4096
  while owner[mine] do
    mine = (mine + 1) % 4096
  end
  local next = string.format('%d', (mine + 1) % 4096)
  redis.call('HSET', KEYS[1], 'next', next, string.format('%d', mine), ARGV[1])
end
return {mine, others}

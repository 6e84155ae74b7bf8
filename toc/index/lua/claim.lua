#!lua flags=allow-oom
-- claim: draws the number under which a worker takes entries of the slot. A worker that holds a number gets it
-- again. Numbers that others hold are skipped. Fields that are not numbers are left alone.
-- If more than 256 are held, all but the last 256 drawn are released, so there is always a free one: workers have
-- died faster than their successors could release their numbers. One may be that of a worker that lives on without
-- owning the slot. If it dies, its entries wait for the prepare timeout, as nobody knows then whose they are.
--
-- KEYS  1   claims    hash of the slot: next -> the counter, number -> worker_id
-- ARGV  1   worker_id
--       2   start     where a missing counter begins (the caller's random number: after a loss of the
--                     hash, numbers of live workers are not drawn again)
-- RETURNS   {number 0..4095, {number, worker_id, ... of the others}}
-- BOUNDS    4096 fields
local function number(text)
  local found = string.match(text, '^%d%d?%d?%d?$') and tonumber(text)
  return found and found < 4096 and string.format('%d', found) == text and found
end
local held = redis.call('HGETALL', KEYS[1])
local owner, count, counter, mine = {}, 0, tonumber(ARGV[2]), nil
for i = 1, #held, 2 do
  local one = number(held[i])
  if held[i] == 'next' then
    counter = number(held[i + 1]) or counter
  elseif one and held[i + 1] == ARGV[1] then
    mine = one
  elseif one then
    owner[one] = held[i + 1]
    count = count + 1
  end
end
local others, old = {}, {}
for one, worker in pairs(owner) do
  if count > 256 and (counter - 1 - one) % 4096 >= 256 then
    old[#old + 1] = string.format('%d', one)
    owner[one] = nil
  else
    others[#others + 1] = string.format('%d', one)
    others[#others + 1] = worker
  end
end
if #old > 0 then
  redis.call('HDEL', KEYS[1], unpack(old))
end
if not mine then
  mine = counter % 4096
  while owner[mine] do
    mine = (mine + 1) % 4096
  end
  local next = string.format('%d', (mine + 1) % 4096)
  redis.call('HSET', KEYS[1], 'next', next, string.format('%d', mine), ARGV[1])
end
return {mine, others}

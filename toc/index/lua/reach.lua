#!lua
-- reach: reads on which server slots were last rebuilt. It writes nothing, but is refused wherever a transition
-- would be (a replica, a server that cannot save, one whose memory is full), so an answer means that all work.
-- For a slot with keys of the wrong type, where no transition works, it returns these keys.
--
-- KEYS  1+  generation, claims, store, prepare, dead   of each slot
-- ARGV  none
-- RETURNS   per slot run_id or nil; or {key, ...}, its keys of another type
-- BOUNDS    500 slots; refused when memory is full (no allow-oom on purpose)
bounded(#KEYS, 5)
local slots = {}
for i = 1, #KEYS, 5 do
  local replies = {
    redis.pcall('GET', KEYS[i]),
    redis.pcall('HGETALL', KEYS[i + 1]),
    redis.pcall('ZCARD', KEYS[i + 2]),
    redis.pcall('ZCARD', KEYS[i + 3]),
    redis.pcall('ZCARD', KEYS[i + 4])
  }
  local wrong = {}
  for n = 1, 5 do
    if type(replies[n]) == 'table' and replies[n].err then
      if string.sub(replies[n].err, 1, 9) ~= 'WRONGTYPE' then
        return replies[n]
      end
      wrong[#wrong + 1] = KEYS[i + n - 1]
    end
  end
  slots[#slots + 1] = #wrong > 0 and wrong or replies[1]
end
return slots

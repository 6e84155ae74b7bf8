#!lua flags=allow-oom
-- reach: reads on which server slots were last rebuilt. Writes nothing, but is refused wherever a
-- transition would be (a replica, a server that cannot save): who gets an answer can work.
--
-- KEYS  1+  generation   of each slot
-- ARGV  none
-- RETURNS   per slot run_id or nil
-- BOUNDS    500 slots
if #KEYS > 500 then
  return redis.error_reply('ERR toc: more than 500 slots in one call')
end
local run_ids = {}
for i = 1, #KEYS, 1 do
  run_ids[i] = redis.call('GET', KEYS[i])
end
return run_ids

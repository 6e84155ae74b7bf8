#!lua flags=allow-oom
-- unclaim: gives a claim number back. The counter stays, so the number is not drawn again soon.
--
-- KEYS  1   claims    hash of the slot: next -> the counter, number -> worker_id
-- ARGV  1   number
-- RETURNS   1, or 0 if it was not held
-- BOUNDS    1 number
return redis.call('HDEL', KEYS[1], ARGV[1])

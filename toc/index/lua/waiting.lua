#!lua flags=allow-oom
-- waiting: publishes what a worker has taken of the slot and cannot start yet.
--
-- KEYS  1   waiting   the note of the slot
-- ARGV  1   note      'since tasks': when the first of these was due in ms, and their number; '0 0': none
--       2   life      ms until the note expires
-- RETURNS   OK
-- BOUNDS    one key
return redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])

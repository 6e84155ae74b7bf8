#!lua flags=allow-oom
-- waiting: notes what a worker has taken of the slot and cannot start yet, for whoever looks at the slot.
--
-- KEYS  1   waiting   the note of the slot
-- ARGV  1   note      'since tasks': when the first of these was due in ms, and how many it holds; '0 0': none
--       2   life      for how many ms it holds
-- RETURNS   OK
-- BOUNDS    one key
return redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])

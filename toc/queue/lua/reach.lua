#!lua flags=allow-oom
-- reach: reads on which server the slot was last rebuilt. Writes nothing, but is refused wherever a
-- transition would be (a replica, a server that cannot save): who gets an answer can work.
--
-- KEYS  1   generation   of the slot
-- ARGV  none
-- RETURNS   run_id or nil
-- BOUNDS    constant
return redis.call('GET', KEYS[1])

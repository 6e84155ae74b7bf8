#!lua flags=allow-oom
-- unclaim: releases claim numbers. The counter stays, so they are not drawn again soon.
--
-- KEYS  1   claims    hash of the slot: next -> the counter, number -> worker_id
-- ARGV  1+  number
-- RETURNS   how many were held
-- BOUNDS    500 numbers
if #ARGV > 500 then
  return redis.error_reply('ERR toc: more than 500 numbers in one call')
end
return redis.call('HDEL', KEYS[1], unpack(ARGV))

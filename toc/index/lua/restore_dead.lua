#!lua
-- restore_dead: restores the DeadQueue entries of dead tasks, and removes their ids from the StoreQueue.
-- An id in the PrepareQueue is left alone: its worker reads the row and buries it.
--
-- KEYS  1   dead      DeadQueue of the slot
--       2   store     StoreQueue of the slot
--       3   prepare   PrepareQueue of the slot
-- ARGV  1+  id, died_ms
-- RETURNS   how many ids were missing in the DeadQueue
-- BOUNDS    500 ids; refused when memory is full (it adds; the sweep comes again)
if #ARGV > 1000 then
  return redis.error_reply('ERR toc: more than 500 ids in one call')
end
local ids = {}
for i = 1, #ARGV, 2 do
  ids[#ids + 1] = ARGV[i]
end
local prepared = redis.call('ZMSCORE', KEYS[3], unpack(ids))
local added, removed = {}, {}
for n = 1, #ids do
  if not prepared[n] then -- [rule: prepared-stays]
    added[#added + 1] = ARGV[2 * n]
    added[#added + 1] = ids[n]
    removed[#removed + 1] = ids[n]
  end
end
if #removed == 0 then
  return 0
end
local missing = redis.call('ZADD', KEYS[1], 'NX', unpack(added))
redis.call('ZREM', KEYS[2], unpack(removed))
return missing

-- KEYS[1] lock, ARGV[1] our value. 1: deleted; 0: nothing there; -1: somebody else's, left alone.
local value = redis.call('get', KEYS[1])
if value == ARGV[1] then
  return redis.call('del', KEYS[1])
end
return value and -1 or 0

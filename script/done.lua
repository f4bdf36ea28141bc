-- KEYS[1] lock, ARGV[1] our value, ARGV[2] our done marker, ARGV[3] its lifetime in ms.
-- 1: the marker is there, set now or by a try whose reply was lost; -1: somebody else's value, left alone.
local value = redis.call('get', KEYS[1])
if not value or value == ARGV[1] then
  redis.call('set', KEYS[1], ARGV[2], 'px', ARGV[3])
  return 1
end
return value == ARGV[2] and 1 or -1

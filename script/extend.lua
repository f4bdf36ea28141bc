-- KEYS[1] lock, ARGV[1] our value, ARGV[2] TTL in ms. 1: extended; 0: not ours. Never creates the key.
if redis.call('get', KEYS[1]) == ARGV[1] then
  return redis.call('pexpire', KEYS[1], ARGV[2])
end
return 0

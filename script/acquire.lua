-- The acquire of WithFencing. KEYS[1] lock, KEYS[2] its fence counter, ARGV[1] our value, ARGV[2] TTL in ms, ARGV[3] the
-- counter's lifetime in ms. Returns what is at the lock now and, if that is ours, our number.
local value = redis.call('get', KEYS[1])
if value and value ~= ARGV[1] then
  -- Told by SET, as without fencing, which fails where Redis takes no writes: what a replica says may be old.
  return {redis.call('set', KEYS[1], ARGV[1], 'nx', 'get', 'px', ARGV[2]), false}
end
local fence = redis.call('get', KEYS[2]) or '0'
if not string.find(fence, '^%d+$') then
  return redis.error_reply('ERR the fence counter ' .. KEYS[2] .. ' holds no number')
end
if value and fence ~= '0' then -- set by a try whose reply was lost
  redis.call('pexpire', KEYS[1], ARGV[2])
  return {value, fence}
end
-- Numbers stay text: Lua's are exact up to 53 bits only, and it does not always print them as digits.
local time = redis.call('time')
local now = time[1] .. string.rep('0', 6 - #time[2]) .. time[2]
if #now > #fence or #now == #fence and now > fence then
  fence = now
else
  redis.call('incr', KEYS[2])
  fence = redis.call('get', KEYS[2])
end
redis.call('set', KEYS[2], fence, 'px', ARGV[3])
redis.call('set', KEYS[1], ARGV[1], 'px', ARGV[2])
return {ARGV[1], fence}

-- If the user has a live session, changes nothing. Otherwise, sets a minimum epoch, below which no session of the user
-- can be opened for a while. Returns 1, or 0 if a session is live. KEYS: the user, the user's session index. ARGV:
-- clock offset (ms), key prefix of the user's sessions, minimum epoch, how long the minimum applies (ms).
local stored = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0')
local ids = redis.call('ZRANGE', KEYS[2], 0, -1)
for _, id in ipairs(ids) do
  local s = redis.call('HMGET', ARGV[2] .. id, 'epoch', 'used', 'ends', 'idle')
  if s[1] and tonumber(s[1]) >= stored and now < tonumber(s[3]) and now < tonumber(s[2]) + tonumber(s[4]) then
    return 0
  end
end
for _, id in ipairs(ids) do
  redis.call('DEL', ARGV[2] .. id)
end
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('HSET', KEYS[1], 'epoch', string.format('%.0f', math.max(stored, tonumber(ARGV[3]))))
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return 1

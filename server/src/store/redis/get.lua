-- A live session: nothing, or {epoch, n, amr, auth_time}. KEYS: the user's epoch, the user's index of sessions, the
-- session. ARGV: offset (ms), session id, how often a use is noted (ms).
local now = redis.call('TIME')
now = now[1] * 1000 + math.floor(now[2] / 1000) + ARGV[1]
local s = redis.call('HMGET', KEYS[3], 'epoch', 'n', 'amr', 'auth_time', 'used', 'ends', 'idle')
if not s[1] then
  return false
end
local used, ends, idle = tonumber(s[5]), tonumber(s[6]), tonumber(s[7])
local stored = tonumber(redis.call('GET', KEYS[1]) or '0')
if tonumber(s[1]) < stored then
  -- Left where it is: the news of the epoch, which may come later than a login at it, may name it as the one to keep.
  return false
end
if now >= ends or now >= used + idle then
  redis.call('DEL', KEYS[3])
  redis.call('ZREM', KEYS[2], ARGV[2])
  return false
end
if now - used >= tonumber(ARGV[3]) then
  redis.call('HSET', KEYS[3], 'used', now)
  redis.call('PEXPIRE', KEYS[3], math.max(math.min(ends - now, idle), 1))
  redis.call('ZADD', KEYS[2], now, ARGV[2])
end
return {s[1], s[2], s[3], s[4]}

-- Opens a session. Returns 1, or 0 if the stored epoch of the user is higher. KEYS: the user, the user's session index,
-- the session.
-- ARGV: clock offset (ms), epoch, session id, ends_at (ms), idle timeout (ms), lifetime of the user's hash (ms),
-- maximum number of sessions, key prefix of the user's sessions, profile (version, email address, whether it is
-- verified, name), then the session's other fields and values.
local epoch = tonumber(ARGV[2])
local stored = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0')
if stored > epoch then
  return 0
end
redis.call('HSET', KEYS[1], 'epoch', ARGV[2])
profile(KEYS[1], ARGV[9], ARGV[10], ARGV[11], ARGV[12])
redis.call('PEXPIRE', KEYS[1], ARGV[6])

local ends = tonumber(ARGV[4])
local ttl = math.max(ends - now, 1)
redis.call('DEL', KEYS[3])
-- Fields that are read most often come first, because Redis stores a small hash as a list and searches it from the
-- start.
redis.call('HSET', KEYS[3], 'epoch', ARGV[2], 'n', 1, 'taken', now, 'used', now, 'noted', now, 'ends', ARGV[4],
  'idle', ARGV[5], unpack(ARGV, 13))
redis.call('HSET', KEYS[3], 'created', now)
redis.call('PEXPIRE', KEYS[3], math.min(ttl, tonumber(ARGV[5]) + RENEW_INTERVAL))

-- If there are too many sessions, drops expired sessions from the index, then ends the least recently used sessions.
-- The new session is never ended here, even if the clock went back.
local max_sessions = tonumber(ARGV[7])
redis.call('ZADD', KEYS[2], now, ARGV[3])
if redis.call('ZCARD', KEYS[2]) > max_sessions then
  local others = {}
  for _, id in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
    local used = redis.call('HGET', ARGV[8] .. id, 'used')
    if not used then
      redis.call('ZREM', KEYS[2], id)
    elseif id ~= ARGV[3] then
      table.insert(others, {id, tonumber(used)})
    end
  end
  table.sort(others, function(a, b) return a[2] < b[2] end)
  for i = 1, #others + 1 - max_sessions do
    redis.call('DEL', ARGV[8] .. others[i][1])
    redis.call('ZREM', KEYS[2], others[i][1])
  end
end
if redis.call('PTTL', KEYS[2]) < ttl then
  redis.call('PEXPIRE', KEYS[2], ttl)
end
return 1

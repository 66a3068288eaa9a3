-- Records another login of the user of a live browser session. Returns 1, or 0 if there is no such session at exactly
-- this epoch. KEYS: the user, the user's session index, the session.
-- ARGV: clock offset (ms), session id, epoch, ends_at (ms), idle timeout (ms), lifetime of the user's hash (ms),
-- profile (version, email address, whether it is verified, name), amr, auth_time (ms).
local s = find_live(now, KEYS[1], KEYS[2], KEYS[3], ARGV[2], 'kind')
if not s or s[10] ~= 'browser' or s[1] ~= ARGV[3] then
  return 0
end
-- The stored epoch of the user is not higher than this epoch, because the session is live.
redis.call('HSET', KEYS[1], 'epoch', ARGV[3])
profile(KEYS[1], ARGV[7], ARGV[8], ARGV[9], ARGV[10])
redis.call('PEXPIRE', KEYS[1], ARGV[6])
local ttl = math.max(tonumber(ARGV[4]) - now, 1)
redis.call('HSET', KEYS[3], 'used', now, 'noted', now, 'ends', ARGV[4], 'idle', ARGV[5], 'amr', ARGV[11], 'auth_time',
  ARGV[12])
redis.call('PEXPIRE', KEYS[3], math.min(ttl, tonumber(ARGV[5]) + RENEW_INTERVAL))
redis.call('ZADD', KEYS[2], now, ARGV[2])
if redis.call('PTTL', KEYS[2]) < ttl then
  redis.call('PEXPIRE', KEYS[2], ttl)
end
return 1

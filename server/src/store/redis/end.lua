-- Ends one session: 1 where it was there, and live. KEYS: the user, the user's index of sessions, the session. ARGV:
-- offset (ms), session id.
local s = look(now, KEYS[1], KEYS[2], KEYS[3], ARGV[2])
redis.call('DEL', KEYS[3])
redis.call('ZREM', KEYS[2], ARGV[2])
return s and 1 or 0

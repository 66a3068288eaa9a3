-- Ends one session, which can be a client session. Returns 1 if it was live, otherwise 0. KEYS: the user, the user's
-- session index, the session, the user's index of client sessions, the client session with the same id. ARGV: clock
-- offset (ms), session id.
local s = find_live(now, KEYS[1], KEYS[2], KEYS[3], ARGV[2]) or find_live(now, KEYS[1], KEYS[4], KEYS[5], ARGV[2])
redis.call('DEL', KEYS[3], KEYS[5])
redis.call('ZREM', KEYS[2], ARGV[2])
redis.call('ZREM', KEYS[4], ARGV[2])
return s and 1 or 0

-- If the session is live, records a use and returns the session as `session_lines` formats it. Otherwise returns nil.
-- Also returns nil, and records no use, if the session's `auth_time` is later than the one in ARGV.
-- KEYS: the user, the user's session index, the session.
-- ARGV: clock offset (ms), session id, latest auth_time (ms; empty: any).
local s, u = find_live(now, KEYS[1], KEYS[2], KEYS[3], ARGV[2])
if not s then
  return false
end
local latest = tonumber(ARGV[3])
if latest and tonumber(s[9]) > latest then
  return false
end
note_use(now, KEYS[2], KEYS[3], ARGV[2], s)
return session_lines(s, u, s[2])

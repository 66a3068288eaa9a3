-- If the session is live, records a use and returns the session as `session_lines` formats it. Otherwise returns nil.
-- KEYS: the user, the user's session index, the session.
-- ARGV: clock offset (ms), session id.
local s, u = find_live(now, KEYS[1], KEYS[2], KEYS[3], ARGV[2])
if not s then
  return false
end
note_use(now, KEYS[2], KEYS[3], ARGV[2], s)
return session_lines(s, u, s[2])

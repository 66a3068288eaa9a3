-- Returns a live session as `told` formats it, otherwise nil. KEYS: the user, the user's session index, the session.
-- ARGV: clock offset (ms), session id.
local s, u = look(now, KEYS[1], KEYS[2], KEYS[3], ARGV[2])
if not s then
  return false
end
note_use(now, KEYS[2], KEYS[3], ARGV[2], s)
return told(s, u, s[2])

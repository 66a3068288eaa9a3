-- A live session: nothing, or what `told` says. KEYS: the user, the user's index of sessions, the session. ARGV: offset
-- (ms), session id.
local s, u = look(now, KEYS[1], KEYS[2], KEYS[3], ARGV[2])
if not s then
  return false
end
note_use(now, KEYS[2], KEYS[3], ARGV[2], s)
return told(s, u, s[2])

-- Returns a live client session as lines: client UID, client ID, scopes, requested claims, browser session, whether the
-- client session ends with the browser session ('1' or ''), then the result of `session_lines`. Returns nil if the
-- client session is not live. If it ends with a browser session that has ended, deletes it and returns nil. KEYS: the
-- user, the user's index of client sessions, the session, the user's session index. ARGV: clock offset (ms), session
-- id, key prefix of the user's sessions, '1' to record a use or ''.
local s, u = find_live(now, KEYS[1], KEYS[2], KEYS[3], ARGV[2], 'client', 'client_id', 'scopes', 'claims', 'browser',
  'bound', 'listed')
if not s then
  return false
end
if s[15] == '1' and not find_live(now, KEYS[1], KEYS[4], ARGV[3] .. s[14], s[14]) then
  redis.call('DEL', KEYS[3])
  redis.call('ZREM', KEYS[2], ARGV[2])
  return false
end
-- A session without the field `listed` is not in the index, because it has no refresh token. Such a session ends with
-- its access token, so a use does not extend it.
if ARGV[4] == '1' and s[16] == '1' then
  note_use(now, KEYS[2], KEYS[3], ARGV[2], s)
end
return table.concat({s[10], s[11], s[12], s[13], s[14], s[15] or '', session_lines(s, u, s[2])}, '\n')

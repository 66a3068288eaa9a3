-- Lists the live client sessions of a user that have a refresh token, most recently used first, each as {id, created,
-- used, ip, user agent, amr, client UID, client ID, scopes}. KEYS: the user, the user's index of client sessions.
-- ARGV: clock offset (ms), key prefix of the user's sessions.
local epoch, prefix = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0'), client_prefix(KEYS[2])
local function is_live(s)
  return s[1] and tonumber(s[1]) >= epoch and now < tonumber(s[3]) and now < tonumber(s[2]) + tonumber(s[4])
end
local sessions = {}
for _, id in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
  local s = redis.call('HMGET', prefix .. id, 'epoch', 'used', 'ends', 'idle', 'created', 'ip', 'user_agent', 'amr',
    'client', 'client_id', 'scopes', 'bound', 'browser')
  local ends_with = s[12] == '1' and s[13]
  local browser = ends_with and redis.call('HMGET', ARGV[2] .. ends_with, 'epoch', 'used', 'ends', 'idle')
  if is_live(s) and (not browser or is_live(browser)) then
    table.insert(sessions, {id, s[5], s[2], s[6], s[7], s[8], s[9], s[10], s[11]})
  end
end
table.sort(sessions, function(a, b) return tonumber(a[3]) > tonumber(b[3]) end)
return sessions

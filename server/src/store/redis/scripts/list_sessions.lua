-- Lists the live sessions of a user, most recently used first, each as {id, created, used, ip, user agent, amr, kind or
-- ''}. KEYS: the user, the user's session index. ARGV: clock offset (ms), key prefix of the user's sessions.
local epoch = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0')
local sessions = {}
for _, id in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
  local s = redis.call('HMGET', ARGV[2] .. id, 'epoch', 'created', 'used', 'ip', 'user_agent', 'amr', 'ends', 'idle',
    'kind')
  if s[1] and tonumber(s[1]) >= epoch and now < tonumber(s[7]) and now < tonumber(s[3]) + tonumber(s[8]) then
    table.insert(sessions, {id, s[2], s[3], s[4], s[5], s[6], s[9] or ''})
  end
end
table.sort(sessions, function(a, b) return tonumber(a[3]) > tonumber(b[3]) end)
return sessions

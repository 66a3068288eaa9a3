-- If the user has a live session, changes nothing. Otherwise, deletes all keys of the user, and sets a minimum epoch,
-- below which no session of the user can be opened for a while. Returns 1, or 0 if a session is live. KEYS: the user,
-- the user's session index, the user's index of client sessions. ARGV: clock offset (ms), key prefix of the user's
-- sessions, minimum epoch, how long the minimum applies (ms).
local stored = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0')
local prefixes, ids = {ARGV[2], client_prefix(KEYS[3])}, {}
for i, prefix in ipairs(prefixes) do
  ids[i] = redis.call('ZRANGE', KEYS[i + 1], 0, -1)
  for _, id in ipairs(ids[i]) do
    local s = redis.call('HMGET', prefix .. id, 'epoch', 'used', 'ends', 'idle', 'bound')
    -- A client session that ends with its browser session does not count: the browser session counts instead.
    if s[1] and s[5] ~= '1' and tonumber(s[1]) >= stored and now < tonumber(s[3])
      and now < tonumber(s[2]) + tonumber(s[4]) then
      return 0
    end
  end
end
for i, prefix in ipairs(prefixes) do
  for _, id in ipairs(ids[i]) do
    redis.call('DEL', prefix .. id)
  end
end
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
redis.call('HSET', KEYS[1], 'epoch', string.format('%.0f', math.max(stored, tonumber(ARGV[3]))))
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return 1

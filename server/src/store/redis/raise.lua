-- Raises the user's epoch: every session ends but the kept one, which moves. KEYS: the user, the user's index of
-- sessions. ARGV: epoch, the user's life (ms), the kept session's id or '', the sessions' key without their id, then the
-- profile's version, address, whether it is verified and name; none where the user is gone.
local epoch = tonumber(ARGV[1])
local stored = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0')
if stored < epoch then
  redis.call('HSET', KEYS[1], 'epoch', ARGV[1])
elseif stored > epoch then
  return 0
end
-- Told again, at the same epoch: sessions opened since then go on.
if ARGV[5] then
  profile(KEYS[1], ARGV[5], ARGV[6], ARGV[7], ARGV[8])
else
  redis.call('HDEL', KEYS[1], 'version', 'email', 'verified', 'name')
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
for _, id in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
  local session = ARGV[4] .. id
  local own = tonumber(redis.call('HGET', session, 'epoch') or '-1')
  if own < 0 then
    redis.call('ZREM', KEYS[2], id)
  elseif own < epoch then
    if id == ARGV[3] then
      redis.call('HSET', session, 'epoch', ARGV[1])
    else
      redis.call('DEL', session)
      redis.call('ZREM', KEYS[2], id)
    end
  end
end
return 1

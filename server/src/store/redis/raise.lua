-- Raises the user's epoch: every session ends but the kept one, which moves. KEYS: the user's epoch, the user's index of
-- sessions. ARGV: epoch, epoch's life (ms), the kept session's id or '', the sessions' key without their id.
local epoch = tonumber(ARGV[1])
local stored = tonumber(redis.call('GET', KEYS[1]) or '0')
if stored < epoch then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
elseif stored > epoch then
  return 0
else
  -- Told again: sessions opened at this epoch since then go on.
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
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

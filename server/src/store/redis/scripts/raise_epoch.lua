-- Raises the user's epoch. This ends every session of a lower epoch except the kept session, which moves to the new
-- epoch. All client sessions of a lower epoch end. Returns 1, or 0 if the stored epoch is higher. KEYS: the user, the
-- user's session index, the user's index of client sessions. ARGV: epoch, lifetime of the user's hash (ms), id of the
-- session to keep or '', key prefix of the user's sessions, then the profile (version, email address, whether it is
-- verified, name). The profile is absent if the user was deleted: then the stored profile and groups are removed.
local epoch = tonumber(ARGV[1])
local stored = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0')
if stored < epoch then
  redis.call('HSET', KEYS[1], 'epoch', ARGV[1])
elseif stored > epoch then
  return 0
end
-- The epoch may be stored already, by an earlier call or by open_session.lua. Sessions that were opened at this epoch
-- continue.
if ARGV[5] then
  profile(KEYS[1], ARGV[5], ARGV[6], ARGV[7], ARGV[8])
else
  redis.call('HDEL', KEYS[1], 'version', 'email', 'verified', 'name', 'groups_version', 'groups')
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
for _, id in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
  local session = ARGV[4] .. id
  local session_epoch = tonumber(redis.call('HGET', session, 'epoch') or '-1')
  if session_epoch < 0 then
    redis.call('ZREM', KEYS[2], id)
  elseif session_epoch < epoch then
    if id == ARGV[3] then
      redis.call('HSET', session, 'epoch', ARGV[1])
    else
      redis.call('DEL', session)
      redis.call('ZREM', KEYS[2], id)
    end
  end
end
end_clients(KEYS[3], function(fields) return tonumber(fields[1]) < epoch end)
return 1

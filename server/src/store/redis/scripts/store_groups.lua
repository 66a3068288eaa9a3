-- Stores the groups of a user, unless the stored version is newer. KEYS: the user. ARGV: version, memberships, lifetime
-- of the user's hash (ms) if the script creates it. Does nothing for a deleted user. The hash of a deleted user has an
-- epoch, but no profile.
local stored = redis.call('HMGET', KEYS[1], 'groups_version', 'epoch', 'version')
if stored[2] and not stored[3] then
  return 0
end
if not stored[1] or tonumber(stored[1]) <= tonumber(ARGV[1]) then
  redis.call('HSET', KEYS[1], 'groups_version', ARGV[1], 'groups', ARGV[2])
end
if redis.call('PTTL', KEYS[1]) < 0 then
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
end
return 1

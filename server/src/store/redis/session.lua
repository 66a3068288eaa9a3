-- What scripts ask of a session. A user's hash holds the epoch and what tokens say of the user.

-- The session's fields and the user's; nothing where there is no such session, it is past its time, or its epoch is
-- older than the user's.
local function look(now, user, index, session, id)
  local s = redis.call('HMGET', session, 'epoch', 'n', 'amr', 'auth_time', 'used', 'ends', 'idle', 'taken', 'late')
  if not s[1] then
    return nil
  end
  local u = redis.call('HMGET', user, 'epoch', 'version', 'email', 'verified', 'name')
  if tonumber(s[1]) < tonumber(u[1] or '0') then
    -- Left where it is: the news of the epoch, which may come later than a login at it, may name it as the one to keep.
    return nil
  end
  local used, ends, idle = tonumber(s[5]), tonumber(s[6]), tonumber(s[7])
  if now >= ends or now >= used + idle then
    redis.call('DEL', session)
    redis.call('ZREM', index, id)
    return nil
  end
  return s, u
end

-- Notes a use.
local function note_use(now, index, session, id, s)
  redis.call('HSET', session, 'used', now)
  redis.call('PEXPIRE', session, math.max(math.min(tonumber(s[6]) - now, tonumber(s[7])), 1))
  redis.call('ZADD', index, now, id)
end

-- What is told of a live session at generation n, a text.
local function told(s, u, n)
  return {s[1], n, s[3], s[4], u[2] or '', u[3] or '', u[4] or '', u[5] or ''}
end

-- Takes a user's profile: its version, address, whether that is verified, and name. An older one is not taken.
local function profile(user, version, email, verified, name)
  local stored = redis.call('HGET', user, 'version')
  if not stored or tonumber(stored) <= tonumber(version) then
    redis.call('HSET', user, 'version', version, 'email', email, 'verified', verified, 'name', name)
  end
end

-- What scripts ask of a session. A user's hash holds the epoch and what tokens say of the user.

-- Reading a session is a write at most so often (ms). Its place in the index and the life of its key are renewed as
-- seldom: the key lives that much longer than it may be idle, and who needs the order looks at the sessions themselves.
local NOTED_EVERY = 60000

-- The session's fields, those that are named after the ones that all want, and the user's; nothing where there is no such
-- session, it is past its time, or its epoch is older than the user's.
local function look(now, user, index, session, id, ...)
  local s = redis.call('HMGET', session, 'epoch', 'n', 'taken', 'used', 'noted', 'ends', 'idle', 'amr', 'auth_time', ...)
  if not s[1] then
    return nil
  end
  local u = redis.call('HMGET', user, 'epoch', 'version', 'email', 'verified', 'name')
  if tonumber(s[1]) < tonumber(u[1] or '0') then
    -- Left where it is: the news of the epoch, which may come later than a login at it, may name it as the one to keep.
    return nil
  end
  local used, ends, idle = tonumber(s[4]), tonumber(s[6]), tonumber(s[7])
  if now >= ends or now >= used + idle then
    redis.call('DEL', session)
    redis.call('ZREM', index, id)
    return nil
  end
  return s, u
end

-- Renews what is renewed now and then, where it is time.
local function renew(now, index, session, id, s)
  if math.abs(now - tonumber(s[5] or '0')) >= NOTED_EVERY then
    redis.call('HSET', session, 'noted', now)
    redis.call('PEXPIRE', session, math.max(math.min(tonumber(s[6]) - now, tonumber(s[7]) + NOTED_EVERY), 1))
    redis.call('ZADD', index, now, id)
  end
end

-- Notes a use that changes nothing else.
local function note_use(now, index, session, id, s)
  if now - tonumber(s[4]) >= NOTED_EVERY then
    redis.call('HSET', session, 'used', now)
    renew(now, index, session, id, s)
  end
end

-- What is told of a live session at generation n, in lines; no value holds a line's end.
local function told(s, u, n)
  return s[1] .. '\n' .. n .. '\n' .. s[8] .. '\n' .. s[9] .. '\n' .. (u[2] or '') .. '\n' .. (u[3] or '') .. '\n'
    .. (u[4] or '') .. '\n' .. (u[5] or '')
end

-- Takes a user's profile: its version, address, whether that is verified, and name. An older one is not taken.
local function profile(user, version, email, verified, name)
  local stored = redis.call('HGET', user, 'version')
  if not stored or tonumber(stored) <= tonumber(version) then
    redis.call('HSET', user, 'version', version, 'email', email, 'verified', verified, 'name', name)
  end
end

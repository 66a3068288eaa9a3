-- Functions for sessions. A user's hash has the epoch, the profile that tokens contain, and the groups.

-- A read of a session records the use in the session at most once per this interval (ms). The index entry and the key's
-- TTL are also renewed at most once per interval. Therefore the key lives this much longer than the idle timeout. The
-- order of the index is not exact, so scripts that need the exact order read the field `used` of the sessions.
local RENEW_INTERVAL = 60000

-- Returns the session's fields `s` (the common ones, then those named in `...`) and the user's fields `u`.
-- Returns nil if the session does not exist, has expired, or has a lower epoch than the user.
local function find_live(now, user, index, session, id, ...)
  local s = redis.call('HMGET', session, 'epoch', 'n', 'taken', 'used', 'noted', 'ends', 'idle', 'amr', 'auth_time', ...)
  if not s[1] then
    return nil
  end
  local u = redis.call('HMGET', user, 'epoch', 'version', 'email', 'verified', 'name')
  if tonumber(s[1]) < tonumber(u[1] or '0') then
    -- The session is not deleted: the epoch change may arrive after a login at the new epoch, and may name this session
    -- as the session to keep.
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

-- Renews the index entry and the key's TTL, at most once per RENEW_INTERVAL.
local function renew(now, index, session, id, s)
  if math.abs(now - tonumber(s[5] or '0')) >= RENEW_INTERVAL then
    redis.call('HSET', session, 'noted', now)
    redis.call('PEXPIRE', session, math.max(math.min(tonumber(s[6]) - now, tonumber(s[7]) + RENEW_INTERVAL), 1))
    redis.call('ZADD', index, now, id)
  end
end

-- Records a use that changes nothing else, at most once per RENEW_INTERVAL.
local function note_use(now, index, session, id, s)
  if now - tonumber(s[4]) >= RENEW_INTERVAL then
    redis.call('HSET', session, 'used', now)
    renew(now, index, session, id, s)
  end
end

-- Formats a live session at generation `n` as lines. No value contains a line break.
local function session_lines(s, u, n)
  return s[1] .. '\n' .. n .. '\n' .. s[8] .. '\n' .. s[9] .. '\n' .. (u[2] or '') .. '\n' .. (u[3] or '') .. '\n'
    .. (u[4] or '') .. '\n' .. (u[5] or '')
end

-- Stores a user's profile, unless the stored version is newer.
local function profile(user, version, email, verified, name)
  local stored = redis.call('HGET', user, 'version')
  if not stored or tonumber(stored) <= tonumber(version) then
    redis.call('HSET', user, 'version', version, 'email', email, 'verified', verified, 'name', name)
  end
end

-- Opens a client session. Returns 1, or 0 if the stored epoch of the user is higher. KEYS: the user, the user's index
-- of client sessions, the session.
-- ARGV: clock offset (ms), epoch, session id, ends_at (ms), idle timeout (ms), lifetime of the user's hash (ms), the
-- first generation, maximum number of sessions in the index, maximum number of these sessions with one client, client
-- UID, '1' to add the session to the index or '', then the session's other fields and values.
local stored = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0')
if stored > tonumber(ARGV[2]) then
  return 0
end
redis.call('HSET', KEYS[1], 'epoch', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[6])
local id, client, ttl = ARGV[3], ARGV[10], math.max(tonumber(ARGV[4]) - now, 1)
redis.call('DEL', KEYS[3])
redis.call('HSET', KEYS[3], 'epoch', ARGV[2], 'n', ARGV[7], 'taken', now, 'used', now, 'noted', now, 'ends', ARGV[4],
  'idle', ARGV[5], 'client', client, 'listed', ARGV[11], unpack(ARGV, 12))
redis.call('HSET', KEYS[3], 'created', now)
redis.call('PEXPIRE', KEYS[3], math.min(ttl, tonumber(ARGV[5]) + RENEW_INTERVAL))
if ARGV[11] ~= '1' then
  return 1
end

-- If there are too many sessions, drops expired sessions from the index, then ends the least recently used ones: first
-- those of the client, then those of the user. The new session itself is never ended, even if the clock was set back.
local max_of_user, max_of_client = tonumber(ARGV[8]), tonumber(ARGV[9])
redis.call('ZADD', KEYS[2], now, id)
if redis.call('ZCARD', KEYS[2]) > math.min(max_of_user, max_of_client) then
  local prefix, others, of_client = client_prefix(KEYS[2]), {}, 1
  for _, other in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
    local fields = redis.call('HMGET', prefix .. other, 'used', 'client')
    if not fields[1] then
      redis.call('ZREM', KEYS[2], other)
    elseif other ~= id then
      table.insert(others, {other, tonumber(fields[1]), fields[2] == client})
      if fields[2] == client then
        of_client = of_client + 1
      end
    end
  end
  table.sort(others, function(a, b) return a[2] < b[2] end)
  local count = #others + 1
  local function end_oldest(max, number, is_counted)
    for _, other in ipairs(others) do
      if number <= max then
        break
      end
      if other[1] and is_counted(other) then
        redis.call('DEL', prefix .. other[1])
        redis.call('ZREM', KEYS[2], other[1])
        other[1] = nil
        number, count = number - 1, count - 1
      end
    end
  end
  end_oldest(max_of_client, of_client, function(other) return other[3] end)
  end_oldest(max_of_user, count, function() return true end)
end
if redis.call('PTTL', KEYS[2]) < ttl then
  redis.call('PEXPIRE', KEYS[2], ttl)
end
return 1

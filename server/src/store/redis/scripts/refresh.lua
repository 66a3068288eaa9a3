-- Decides the outcome of a refresh (specification: Sessions and tokens, Refresh). KEYS: the user, the index that
-- contains the session (the user's session index or index of client sessions), the session. For a client session that
-- ends with its browser session, two more KEYS: the user's session index, and the browser session. The key of the
-- browser session ends with its id.
-- ARGV: clock offset (ms), session id, the token's generation, grace period (ms), maximum number of late responses
-- (responses to the previous token after its grace period), the time in which late responses are counted (ms), what a
-- late response adds to the session's lateness (each new generation subtracts one), maximum lateness, then for each
-- window of the limit on new generations its maximum count and the length of a bucket (ms).
-- Returns lines, which parse faster than a list: the outcome and, if the session continues, the result of
-- `session_lines`; or 'limited', the window's index from 1 and the ms until a retry succeeds.
local mark_fields = {}
for i = 10, #ARGV, 2 do
  table.insert(mark_fields, 'w' .. ARGV[i])
end
local s, u = find_live(now, KEYS[1], KEYS[2], KEYS[3], ARGV[2], unpack(mark_fields))
if not s then
  return 'not_found'
end
local browser_id, browser
if KEYS[5] then
  browser_id = string.sub(KEYS[5], -36)
  browser = find_live(now, KEYS[1], KEYS[4], KEYS[5], browser_id)
  if not browser then
    redis.call('DEL', KEYS[3])
    redis.call('ZREM', KEYS[2], ARGV[2])
    return 'not_found'
  end
end
local n, generation = tonumber(s[2]), tonumber(ARGV[3])
local session = KEYS[3]
if generation >= n then
  local changed, limited, longest = {}, 0, -1
  for i, field in ipairs(mark_fields) do
    local marks, wait = add_mark(now, generation, tonumber(ARGV[2 * i + 7]), tonumber(ARGV[2 * i + 8]), s[9 + i] or '')
    if wait and wait > longest then
      limited, longest = i, wait
    elseif marks then
      table.insert(changed, field)
      table.insert(changed, marks)
    end
  end
  if limited > 0 then
    return 'limited\n' .. limited .. '\n' .. longest
  end
  local new_generation, at = string.format('%.0f', generation + 1), string.format('%.0f', now)
  redis.call('HSET', session, 'n', new_generation, 'taken', at, 'used', at, unpack(changed))
  renew(now, KEYS[2], session, ARGV[2], s)
  if browser then
    note_use(now, KEYS[4], KEYS[5], browser_id, browser)
  end
  -- If the token's generation is higher than the stored generation, Redis has lost writes. The token proves that its
  -- generation existed, so the session continues from this generation.
  return (generation == n and 'rotated\n' or 'adopted\n') .. session_lines(s, u, new_generation)
end
local outcome
if generation == n - 1 then
  if now - tonumber(s[3]) < tonumber(ARGV[4]) then
    outcome = 'repeated'
  else
    -- The token of generation n was never used: the response that contained it may have been lost. The grace period of
    -- the token of generation n - 1 starts again now.
    local stored = redis.call('HMGET', session, 'late', 'lateness')
    local late = {}
    for at in string.gmatch(stored[1] or '', '%d+') do
      if now - tonumber(at) < tonumber(ARGV[6]) then
        table.insert(late, at)
      end
    end
    -- The field `lateness` contains two numbers: the lateness after the last late response, and the generation at that
    -- time. Each later generation subtracts one, even a generation that an older version of the server made.
    local lateness, since = string.match(stored[2] or '', '^(%d+) (%d+)$')
    lateness = math.max(tonumber(lateness or '0') - math.max(n - tonumber(since or '0'), 0), 0) + tonumber(ARGV[7])
    if #late < tonumber(ARGV[5]) and lateness <= tonumber(ARGV[8]) then
      table.insert(late, string.format('%.0f', now))
      redis.call('HSET', session, 'taken', now, 'late', table.concat(late, ' '), 'lateness',
        string.format('%.0f %.0f', lateness, n))
      outcome = 'late'
    end
  end
end
if outcome then
  note_use(now, KEYS[2], session, ARGV[2], s)
  if browser then
    note_use(now, KEYS[4], KEYS[5], browser_id, browser)
  end
  return outcome .. '\n' .. session_lines(s, u, s[2])
end
redis.call('DEL', session)
redis.call('ZREM', KEYS[2], ARGV[2])
return 'reuse_detected'

-- Counts a refusal in the row of its kind, user and client address. The number of rows per App and quarter of an hour
-- is bounded.
-- KEYS: the rows of the quarter; the user of each account in the quarter; the user of each account in the quarter
-- before.
-- ARGV: clock offset (ms), quarter, kind, account or '', user or '', client address, maximum number of rows per user,
-- maximum number of rows with a user, maximum number of rows without a user, lifetime of the rows (ms).
-- Returns 0. If Redis's clock is in another quarter, counts nothing and returns that quarter, so a finished quarter
-- never changes.
local quarter = math.floor(now / 900000)
if quarter ~= tonumber(ARGV[2]) then
  return quarter
end
local kind, account, user, client = ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local max_per_user, max_user_rows, max_anonymous_rows = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
if account ~= '' then
  -- If ARGV names no user, the attempt was refused before the account was looked up. An earlier refusal may have
  -- recorded the account's user.
  if user == '' then
    user = redis.call('HGET', KEYS[2], account) or redis.call('HGET', KEYS[3], account) or ''
  elseif redis.call('HLEN', KEYS[2]) < max_user_rows then
    redis.call('HSET', KEYS[2], account, user)
    redis.call('PEXPIRE', KEYS[2], 2 * 900000)
  end
end
local function number(field)
  return tonumber(redis.call('HGET', KEYS[1], field) or '0')
end
local row = kind .. ' ' .. user .. ' ' .. client
if redis.call('HEXISTS', KEYS[1], row) == 0 then
  if user ~= '' and number('#' .. user) >= max_per_user then
    row = kind .. ' ' .. user .. ' '
  end
  if redis.call('HEXISTS', KEYS[1], row) == 0 then
    -- The fields that count rows: '#' counts rows without a user, '##' rows with a user, '#USER' rows of one user.
    local total, max = '#', max_anonymous_rows
    if user ~= '' then
      total, max = '##', max_user_rows
    end
    if number(total) >= max then
      row = kind .. '  '
    else
      redis.call('HINCRBY', KEYS[1], total, 1)
      if user ~= '' then
        redis.call('HINCRBY', KEYS[1], '#' .. user, 1)
      end
    end
  end
end
redis.call('HINCRBY', KEYS[1], row, 1)
redis.call('PEXPIRE', KEYS[1], ARGV[10])
return 0

-- Counts one use in each window of a limit. If the limit is reached, counts the use in no window. KEYS: one counter per
-- window. ARGV: clock offset (ms), then for each window its maximum count and the length of a bucket (ms). Returns
-- {0, now} or, if the limit is reached, {the window's index from 1, ms until a retry succeeds}.
local limited, wait = acquire(now, KEYS, {unpack(ARGV, 2)})
if limited > 0 then
  return {limited, wait}
end
return {0, now}

-- Checks whether one use fits in each window of a limit, and counts nothing. KEYS, ARGV and the result are those of
-- acquire.lua.
local limited, wait = acquire(now, KEYS, {unpack(ARGV, 2)}, true)
if limited > 0 then
  return {limited, wait}
end
return {0, now}

-- Counts one use in each window of a limit. If the limit is reached, or with `only_check`, counts the use in no window.
-- `counters`: one key per window; `windows`: for each window its maximum count and the length of a bucket (ms). Returns
-- 0 or, if the limit is reached, the window's index from 1 and the ms until a retry succeeds.
-- A window has 50 buckets; a counter contains only the buckets with uses. A bucket is counted until it lies completely
-- outside the window. Therefore no window ever admits more than its maximum count. In return, a use can be counted
-- longer than the window lasts, by up to the length of one bucket. A bucket in the future was counted before the clock
-- went back; it is ignored if it is more than one window ahead.
local function acquire(now, counters, windows, only_check)
  local limited, longest = 0, -1
  local stale = {}
  for i, key in ipairs(counters) do
    local count, width = tonumber(windows[2 * i - 1]), tonumber(windows[2 * i])
    local oldest = math.floor(now / width) - 50
    local sum, old = 0, nil
    local all = redis.call('HGETALL', key)
    for j = 1, #all, 2 do
      local bucket, n = tonumber(all[j]), tonumber(all[j + 1])
      if bucket < oldest or bucket > oldest + 100 or n <= 0 then
        old = old or {}
        table.insert(old, all[j])
      else
        sum = sum + n
      end
    end
    stale[i] = old or false
    if sum + 1 > count then
      local live = {}
      for j = 1, #all, 2 do
        local bucket, n = tonumber(all[j]), tonumber(all[j + 1])
        if bucket >= oldest and bucket <= oldest + 100 and n > 0 then
          table.insert(live, {bucket, n})
        end
      end
      table.sort(live, function(a, b) return a[1] < b[1] end)
      local too_many, wait = sum + 1 - count, 1
      for _, b in ipairs(live) do
        too_many = too_many - b[2]
        wait = (b[1] + 51) * width - now
        if too_many <= 0 then
          break
        end
      end
      if wait > longest then
        limited, longest = i, wait
      end
    end
  end
  if limited > 0 then
    return limited, longest
  end
  if only_check then
    return 0, 0
  end
  for i, key in ipairs(counters) do
    local width = tonumber(windows[2 * i])
    if stale[i] then
      redis.call('HDEL', key, unpack(stale[i]))
    end
    if redis.call('HINCRBY', key, math.floor(now / width), 1) == 1 then
      redis.call('PEXPIRE', key, 51 * width)
    end
  end
  return 0, 0
end

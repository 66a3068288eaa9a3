-- KEYS: a counter for each window. ARGV: offset (ms), then for each window its count and the length of a fiftieth of it
-- (ms). Answers {0, now} or, refused, {the window's place from 1, ms until it would be let through}.
local refused, wait = take(now, KEYS, {unpack(ARGV, 2)})
if refused > 0 then
  return {refused, wait}
end
return {0, now}

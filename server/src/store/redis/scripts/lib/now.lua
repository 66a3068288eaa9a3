-- `now`: Redis's clock plus the clock offset in ARGV[1], in ms.
local now = redis.call('TIME')
now = now[1] * 1000 + math.floor(now[2] / 1000) + ARGV[1]

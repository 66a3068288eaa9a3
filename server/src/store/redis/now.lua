-- Redis's clock and the offset that is given first, in ms.
local now = redis.call('TIME')
now = now[1] * 1000 + math.floor(now[2] / 1000) + ARGV[1]

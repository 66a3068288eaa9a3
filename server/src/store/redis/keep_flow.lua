-- Keeps a flow that no browser holds. KEYS: the index of the App's flows that are alive, the flow.
-- ARGV: offset (ms), life (ms), most alive, the flow's id, the flow.
-- Answers 0 or, where as many are alive as may be, the ms until the oldest ends.
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[3]) then
  local oldest = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
  return math.max(math.ceil(oldest[2] - now), 1)
end
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[4])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('SET', KEYS[2], ARGV[5], 'PX', ARGV[2])
return 0

-- Removes the quarters of an hour with expired refusals. Then lists the finished quarters with refusals that are not in
-- Postgres yet, oldest first. KEYS: all quarters, scored by their end. ARGV: clock offset (ms), how many to skip, how
-- many to return, lifetime of refusals (ms).
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[4])
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', ARGV[2], ARGV[3])

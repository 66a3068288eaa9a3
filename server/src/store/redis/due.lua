-- Quarters of an hour that are over and whose refusals are to be written, the oldest first. KEYS: all of them, by their
-- end. ARGV: offset (ms), how many to pass over, how many, life of the refusals (ms).
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[4])
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', ARGV[2], ARGV[3])

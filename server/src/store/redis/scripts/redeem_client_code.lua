-- Records that a code was exchanged for a session. Returns '' for the first exchange, the session of the first exchange
-- for each later exchange, or nil if the code is not stored. KEYS: the code. ARGV: session id, how long an exchanged
-- code is kept (s), the record that replaces the record of the code.
if redis.call('HEXISTS', KEYS[1], 'code') == 0 then
  return false
end
local first = redis.call('HGET', KEYS[1], 'session')
if first then
  return first
end
redis.call('HSET', KEYS[1], 'session', ARGV[1], 'code', ARGV[3])
redis.call('EXPIRE', KEYS[1], ARGV[2])
return ''

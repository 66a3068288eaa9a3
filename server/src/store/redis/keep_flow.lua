-- Keeps an unbound flow. If the App has the most flows that it can have, the oldest flow of the client address with the most is
-- forgotten: a client that fills the App's places loses only its own. The work is bounded: each call forgets
-- at most 64 flows that have ended and one or two that have not.
-- KEYS: see forget_flow.lua. ARGV: offset (ms), the two keys of forget_flow.lua, life (ms), most alive, the flow's id, the
-- flow, its client address. Answers how many were forgotten to make room.
local life, most, id, client = ARGV[4], tonumber(ARGV[5]), ARGV[6], ARGV[8]
for _, ended in ipairs(redis.call('ZRANGEBYSCORE', keys.alive, '-inf', now, 'LIMIT', 0, 64)) do
  forget(keys, ended)
end
local forgotten = 0
if redis.call('ZCARD', keys.alive) >= most then
  local heaviest, oldest
  for _ = 1, 2 do
    heaviest = redis.call('ZREVRANGE', keys.counts, 0, 0)[1]
    oldest = heaviest and redis.call('ZRANGE', keys.of .. heaviest, 0, 0)[1]
    if oldest or not heaviest then
      break
    end
    -- A server of an older version forgot its flows, and not their count.
    redis.call('ZREM', keys.counts, heaviest)
  end
  if oldest then
    forget(keys, oldest)
    forgotten = 1
  end
  -- A server of an older version keeps no counts.
  if redis.call('ZCARD', keys.alive) >= most then
    forget(keys, redis.call('ZRANGE', keys.alive, 0, 0)[1])
    forgotten = forgotten + 1
  end
end
local ends = now + life
redis.call('ZADD', keys.alive, ends, id)
redis.call('ZADD', keys.of .. client, ends, id)
redis.call('HSET', keys.clients, id, client)
redis.call('ZINCRBY', keys.counts, 1, client)
for _, key in ipairs({ keys.alive, keys.clients, keys.counts, keys.of .. client }) do
  redis.call('PEXPIRE', key, life)
end
redis.call('SET', keys.flow .. id, ARGV[7], 'PX', life)
return forgotten

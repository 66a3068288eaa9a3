-- Stores an unbound flow. If the App has the maximum number of flows, first removes the oldest flow of the client with
-- the most flows. So a client that uses up the App's maximum loses its own flows, and the other clients keep theirs.
-- The work is bounded: each call removes at most 64 expired flows and two live flows.
-- KEYS: as in lib/flows.lua. ARGV: clock offset (ms), the two key prefixes of lib/flows.lua, lifetime (ms), maximum
-- number of flows, flow id, flow, client. Returns how many live flows were removed.
local ttl, max_flows, id, client = ARGV[4], tonumber(ARGV[5]), ARGV[6], ARGV[8]
for _, ended in ipairs(redis.call('ZRANGEBYSCORE', keys.alive, '-inf', now, 'LIMIT', 0, 64)) do
  remove_flow(keys, ended)
end
local removed = 0
if redis.call('ZCARD', keys.alive) >= max_flows then
  local heaviest, oldest
  for _ = 1, 2 do
    heaviest = redis.call('ZREVRANGE', keys.counts, 0, 0)[1]
    oldest = heaviest and redis.call('ZRANGE', keys.of .. heaviest, 0, 0)[1]
    if oldest or not heaviest then
      break
    end
    -- The client has a count but no flow: an older version of the server removed flows without their counts.
    redis.call('ZREM', keys.counts, heaviest)
  end
  if oldest then
    remove_flow(keys, oldest)
    removed = 1
  end
  -- The App can still have too many flows: an older version of the server stored flows without counts.
  if redis.call('ZCARD', keys.alive) >= max_flows then
    remove_flow(keys, redis.call('ZRANGE', keys.alive, 0, 0)[1])
    removed = removed + 1
  end
end
local ends = now + ttl
redis.call('ZADD', keys.alive, ends, id)
redis.call('ZADD', keys.of .. client, ends, id)
redis.call('HSET', keys.clients, id, client)
redis.call('ZINCRBY', keys.counts, 1, client)
-- An index lives as long as its longest flow. Not all flows have the same lifetime.
for _, key in ipairs({ keys.alive, keys.clients, keys.counts, keys.of .. client }) do
  if redis.call('PTTL', key) < tonumber(ttl) then
    redis.call('PEXPIRE', key, ttl)
  end
end
redis.call('SET', keys.flow .. id, ARGV[7], 'PX', ttl)
return removed

-- Removes an unbound flow from everything that an App keeps of its flows; returns whether it was there. `keys`: the
-- flows that are alive, by their end; the client address of each; how many each client address has; then, without a
-- flow's id or a client address, the keys of flows and of the flows of a client address.
local function forget(keys, id)
  local client = redis.call('HGET', keys.clients, id)
  redis.call('ZREM', keys.alive, id)
  if client then
    redis.call('HDEL', keys.clients, id)
    redis.call('ZREM', keys.of .. client, id)
    if tonumber(redis.call('ZINCRBY', keys.counts, -1, client)) <= 0 then
      redis.call('ZREM', keys.counts, client)
    end
  end
  return redis.call('DEL', keys.flow .. id)
end
local keys = { alive = KEYS[1], clients = KEYS[2], counts = KEYS[3], flow = ARGV[2], of = ARGV[3] }

-- Removes an unbound flow and its index entries. Returns 1 if the flow existed, otherwise 0. `keys` has the fields
-- `alive` (flow ids, scored by their end), `clients` (the client of each flow id), `counts` (the number of flows of
-- each client), `flow` (the key prefix of a flow) and `of` (the key prefix of the flow ids of a client).
-- KEYS: `alive`, `clients`, `counts`. ARGV[2] and ARGV[3]: the key prefixes `flow` and `of`.
local function remove_flow(keys, id)
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

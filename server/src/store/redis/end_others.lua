-- Ends every session but one; answers the ids of those that were there. KEYS: the user's index of sessions. ARGV: the id
-- of the one that goes on, the sessions' key without their id.
local ended = {}
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  if id ~= ARGV[1] then
    if redis.call('DEL', ARGV[2] .. id) == 1 then
      table.insert(ended, id)
    end
    redis.call('ZREM', KEYS[1], id)
  end
end
return ended

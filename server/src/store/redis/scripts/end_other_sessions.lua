-- Ends every session in the user's session index except one, and every session in the user's index of client sessions.
-- Returns the ids of the ended sessions. KEYS: these two indexes. ARGV: id of the session to keep, key prefix of the
-- user's sessions.
local ended = {}
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  if id ~= ARGV[1] then
    if redis.call('DEL', ARGV[2] .. id) == 1 then
      table.insert(ended, id)
    end
    redis.call('ZREM', KEYS[1], id)
  end
end
for _, id in ipairs(end_clients(KEYS[2], function() return true end)) do
  table.insert(ended, id)
end
return ended

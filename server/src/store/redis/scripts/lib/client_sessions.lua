-- Functions for client sessions. The keys of client sessions have another form than the keys of other sessions, because
-- older servers must not take a client session for a session of the App. The index of client sessions contains only
-- client sessions with a refresh token.

-- The key prefix of the sessions in an index: `…:client-sessions` becomes `…:client-session:`.
local function client_prefix(index)
  return string.sub(index, 1, -2) .. ':'
end

-- Deletes the sessions of an index for which `ends(fields)` is true, and index entries without a session. `fields` are
-- the session's fields that are named in `...`. Returns the ids of the deleted sessions.
local function end_clients(index, ends, ...)
  local prefix, ended = client_prefix(index), {}
  for _, id in ipairs(redis.call('ZRANGE', index, 0, -1)) do
    local fields = redis.call('HMGET', prefix .. id, 'epoch', ...)
    if not fields[1] then
      redis.call('ZREM', index, id)
    elseif ends(fields) then
      redis.call('DEL', prefix .. id)
      redis.call('ZREM', index, id)
      table.insert(ended, id)
    end
  end
  return ended
end

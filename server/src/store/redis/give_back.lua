-- Gives back one of each window. KEYS: a counter for each window. ARGV: the fiftieth of each that it was taken in.
for i, key in ipairs(KEYS) do
  if tonumber(redis.call('HGET', key, ARGV[i]) or '0') > 0 then
    redis.call('HINCRBY', key, ARGV[i], -1)
  end
end
return 1

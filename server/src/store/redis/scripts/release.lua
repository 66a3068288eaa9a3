-- Subtracts one use from each window. KEYS: one counter per window. ARGV: for each window the bucket that counted the
-- use.
for i, key in ipairs(KEYS) do
  if tonumber(redis.call('HGET', key, ARGV[i]) or '0') > 0 then
    redis.call('HINCRBY', key, ARGV[i], -1)
  end
end
return 1

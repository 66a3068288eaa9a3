-- What tokens say of a user has changed. KEYS: the user. ARGV: version, address, whether it is verified, name. A user
-- who never had a session needs none; one who is gone has none either, and gets none again.
if redis.call('HEXISTS', KEYS[1], 'version') == 1 then
  profile(KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4])
end
return 1

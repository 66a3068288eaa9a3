-- Stores a changed profile. KEYS: the user. ARGV: version, email address, whether it is verified, name. Does nothing
-- for a user who never had a session, or who was deleted: such a user needs no profile.
if redis.call('HEXISTS', KEYS[1], 'version') == 1 then
  profile(KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4])
end
return 1

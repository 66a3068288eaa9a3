-- Ends every listed session of a client. Returns the ids of the ended sessions. KEYS: the user's index of client
-- sessions. ARGV: client UID.
return end_clients(KEYS[1], function(fields) return fields[2] == ARGV[1] end, 'client')

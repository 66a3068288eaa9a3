-- Ends the sessions with one client that are in the user's index of client sessions. Returns the ids of the ended
-- sessions. KEYS: this index. ARGV: client UID.
return end_clients(KEYS[1], function(fields) return fields[2] == ARGV[1] end, 'client')

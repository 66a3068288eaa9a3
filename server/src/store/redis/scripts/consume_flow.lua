-- Consumes an unbound flow. KEYS: as in lib/flows.lua. ARGV: flow id, the two key prefixes of lib/flows.lua. Returns 1,
-- or 0 if the flow does not exist.
return remove_flow(keys, ARGV[1])

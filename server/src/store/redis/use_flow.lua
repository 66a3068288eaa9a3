-- Uses an unbound flow. KEYS: as in forget_flow.lua. ARGV: flow id, the two key prefixes of forget_flow.lua. Returns 1,
-- or 0 if the flow does not exist.
return forget(keys, ARGV[1])

-- Uses a flow that no browser holds. KEYS: see forget_flow.lua. ARGV: the flow's id, the two keys of forget_flow.lua.
-- Answers 1 or, where it is not there, 0.
return forget(keys, ARGV[1])

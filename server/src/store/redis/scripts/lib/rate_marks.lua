-- Limits the new generations of one session in one window, by the rule of windows.lua. No counter is needed, because
-- the generation of the session is itself a counter. `marks` are pairs of doubles, oldest first: a bucket, and the
-- generation of the session when the bucket began. The first new generation in a bucket adds a mark. A mark is dropped
-- when its bucket lies completely outside the window. `count`: new generations that the window allows; `width`: length
-- of a bucket (ms).
-- Returns the marks if they change, otherwise nil. If the limit is reached, returns nil and the ms until a retry
-- succeeds.
local function add_mark(now, generation, count, width, marks)
  local this, size = math.floor(now / width), #marks
  local at, first = 1, nil
  while at < size do
    local bucket, before = struct.unpack('<dd', marks, at)
    -- A mark in the future was made before the clock went back. It is used if it is at most one window ahead.
    if bucket >= this - 50 and bucket <= this + 50 then
      first = before
      break
    end
    at = at + 16
  end
  if not first then
    return struct.pack('<dd', this, generation)
  end
  if generation - first + 1 > count then
    local last = struct.unpack('<d', marks, at)
    for later = at + 16, size, 16 do
      local bucket, before = struct.unpack('<dd', marks, later)
      if generation - before + 1 <= count then
        break
      end
      last = bucket
    end
    return nil, (last + 51) * width - now
  end
  if struct.unpack('<d', marks, size - 15) < this then
    return string.sub(marks, at) .. struct.pack('<dd', this, generation)
  elseif at > 1 then
    return string.sub(marks, at)
  end
end

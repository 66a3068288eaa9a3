-- Counts the new generations of one session in one window by the rule of windows.lua, without a counter: the session's
-- own generation is one. `marks`, oldest first, are pairs of doubles (fiftieth, generation): when that fiftieth of the
-- window began, the session was at that generation. One is added where a fiftieth has its first new generation, and is
-- dropped once it lies wholly outside of the window. `count` may be had in the window, whose fiftieth is `width` (ms)
-- long.
-- Answers the marks where they change; nil and ms until it would be let through where it has to wait.
local function mark(now, generation, count, width, marks)
  local this, size = math.floor(now / width), #marks
  local at, first = 1, nil
  while at < size do
    local fiftieth, before = struct.unpack('<dd', marks, at)
    -- A mark that is later than now was made by a clock that has gone back since; one more than a window later says
    -- nothing.
    if fiftieth >= this - 50 and fiftieth <= this + 50 then
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
      local fiftieth, before = struct.unpack('<dd', marks, later)
      if generation - before + 1 <= count then
        break
      end
      last = fiftieth
    end
    return nil, (last + 51) * width - now
  end
  if struct.unpack('<d', marks, size - 15) < this then
    return string.sub(marks, at) .. struct.pack('<dd', this, generation)
  elseif at > 1 then
    return string.sub(marks, at)
  end
end

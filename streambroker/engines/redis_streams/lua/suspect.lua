-- (part) Whether a message with so many deliveries is handed out as a last chance: kept apart from other such messages,
-- so that a death tells whose it was. With a limit of four and more the last but one delivery is such a chance too, and
-- a message is convicted only by losing both: a worker that is killed from outside takes no innocent one with it.
local function suspect(limit, count)
  return limit > 0 and count >= (limit >= 4 and limit - 2 or math.max(1, limit - 1))
end

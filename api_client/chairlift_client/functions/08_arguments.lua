-- What submit is given, before anything of it becomes part of a key, of an entry or of arithmetic. Our own clients
-- check more than this; clients in other languages meet it here, and not halfway through a write.

local WHOLE = '^%d+$'
local MOST_DIGITS = 15 -- exact as a double, with room for sums

local function whole(least)
  return function(text)
    return #text <= MOST_DIGITS and text:find(WHOLE) ~= nil and tonumber(text) >= least
  end
end

local function like(pattern, least, most)
  return function(text)
    return #text >= least and #text <= most and text:find(pattern) ~= nil
  end
end

local IS_CLASS = { high = true, normal = true, low = true, batch = true } -- while loading there is no ipairs

local SUBMIT_ARGUMENTS = {
  { 'id', like('^[%w._/-]+$', 1, 128) },
  { 'version', whole(1) },
  { 'class', function(text) return IS_CLASS[text] == true end },
  { 'tenant', like('^[%w._-]+$', 1, 64) },
  { 'bytes', whole(0) },
  { 'cost', whole(0) },
  { 'seed', like('^%-?%d+$', 1, 20) },
  { 'deadline', whole(0) },
  { 'delay', whole(0) },
  { 'run at', whole(0) },
  { 'queue ttl', whole(1) },
  { 'result ttl', whole(1) },
  { 'idempotency hash', like('^[%w._-]*$', 0, 128) },
  { 'body hash', like('^[%w._-]*$', 0, 128) },
  { 'prompt tokens', whole(0) },
  { 'output tokens', whole(0) },
  { 'allow unknown model', like('^[01]$', 1, 1) },
}

-- The first argument that cannot be, with its value: {'invalid', name, value}; nil where all are right.
local function malformed(args)
  for index, argument in ipairs(SUBMIT_ARGUMENTS) do
    local name, is_right = argument[1], argument[2]
    local value = args[index]
    if not value or not is_right(value) then
      return { 'invalid', name, string.sub(value or '', 1, 64) }
    end
  end
  local body = args[#SUBMIT_ARGUMENTS + 1]
  if not body or #body ~= tonumber(args[5]) then
    return { 'invalid', 'bytes', args[5] }
  end
  return nil
end

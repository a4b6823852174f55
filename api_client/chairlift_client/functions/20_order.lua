-- Who is next.
--
-- Order: resumed first, then the classes by weight times age of their head ("waiting time priority",
-- Kleinrock 1964), so that a low class is slower but never starves; within a class the least served tenant.
local WEIGHTS = { high = 64, normal = 16, low = 4, batch = 1 }
local PROMOTE = 256

local function promote_due(p, now)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', p .. ':later', '-inf', now, 'LIMIT', 0, PROMOTE)) do
    redis.call('ZREM', p .. ':later', id)
    count(p, 'delayed', -1)
    local job = read(p, id, 'state', 'class', 'tenant', 'seq', 'queue_ttl', 'result_ttl')
    if job[1] == 'delayed' then
      local stream = job[4] == '0' and 'q:' .. job[2] .. ':' .. job[3] or 'q:resumed'
      enqueue(p, id, stream, now, life_of(job[5], job[6]))
    end
  end
end

local function next_due(p, now)
  local soonest = -1
  for _, key in ipairs { p .. ':later', p .. ':live' } do
    local first = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')
    if first[2] then
      local wait = math.max(0, tonumber(first[2]) - now)
      soonest = soonest < 0 and wait or math.min(soonest, wait)
    end
  end
  return soonest
end

local function read_new(key, worker)
  local reply = redis.pcall('XREADGROUP', 'GROUP', GROUP, worker, 'COUNT', 1, 'STREAMS', key, '>')
  if not reply or reply.err then
    return nil, reply and reply.err
  end
  return reply[1][2][1]
end

-- A stream that is not there is not read: every such error would count in the server's statistics. A group
-- that is not there begins again at 0; `board` knows what is read a second time.
local function read_one(p, stream, worker)
  local key = p .. ':' .. stream
  if redis.call('EXISTS', key) == 0 then
    return nil
  end
  local entry, trouble = read_new(key, worker)
  if trouble then
    ensure_group(key)
    entry = read_new(key, worker)
  end
  if entry then
    return entry[1], entry[2][2]
  end
end

-- The age in ms of the first entry that nobody has taken: entry ids are the server's milliseconds.
local function head_age(p, stream, now)
  local head = head_of(p, stream)
  return head and now - tonumber(string.match(head, '^%d+'))
end

local function next_tenant(p, class)
  return redis.call('ZRANGE', p .. ':active:' .. class, 0, 0)[1]
end

-- A tenant whose head is not found comes first: its stream is gone or lacks its group, and reading tells.
local function pick_stream(p, now)
  local choices = {}
  for _, class in ipairs(CLASSES) do
    local tenant = next_tenant(p, class)
    if tenant then
      choices[#choices + 1] = { class, tenant, stream = 'q:' .. class .. ':' .. tenant }
    end
  end
  local best, best_score = choices[1], nil
  for _, choice in ipairs(#choices > 1 and choices or {}) do
    local age = head_age(p, choice.stream, now)
    local score = age and (age + 1) * WEIGHTS[choice[1]] or math.huge
    if not best_score or score > best_score then
      best, best_score = choice, score
    end
  end
  return best
end

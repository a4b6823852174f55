-- claim: worker, request number, capacity, lease, schema version, jobs on board, carries a suspect (1/0)
-- → {now, ms until the next due entry or -1, last wake id, {"<id> <epoch>" to cancel …}, {job …}}
--   job = {id, epoch, seq, losses, failures, alone (1/0), seed, deadline, submitted, boarded, class, tenant,
--          body, {logged event …}}
--
-- Order: resumed first, then the classes by weight times age of their head ("waiting time priority",
-- Kleinrock 1964), so that a low class is slower but never starves; within a class the least served tenant.
local WEIGHTS = { high = 64, normal = 16, low = 4, batch = 1 }
local PROMOTE = 256

local function promote_due(p, now)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', p .. ':later', '-inf', now, 'LIMIT', 0, PROMOTE)) do
    redis.call('ZREM', p .. ':later', id)
    count(p, 'delayed', -1)
    local job = read(p, id, 'state', 'class', 'tenant', 'epoch', 'queue_ttl', 'result_ttl')
    if job[1] == 'delayed' then
      local stream = job[4] == '0' and 'q:' .. job[2] .. ':' .. job[3] or 'q:resumed'
      enqueue(p, id, stream, now, tonumber(job[5]) + tonumber(job[6]))
    end
  end
end

local function expire_due(p, now)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', p .. ':expiry', '-inf', now, 'LIMIT', 0, PROMOTE)) do
    local job = read(p, id, 'state', 'deadline', 'queue_ttl')
    if job[1] == 'waiting' or job[1] == 'delayed' then
      local deadline = tonumber(job[2])
      if deadline > 0 and deadline <= now then
        fail_job(p, id, 'deadline', 'the deadline passed while the job was waiting', now)
      else
        fail_job(p, id, 'queue_timeout', 'not boarded within its queue lifetime of ' .. job[3] .. ' ms', now)
      end
    end
    redis.call('ZREM', p .. ':expiry', id)
  end
end

local function next_due(p, now)
  local soonest = -1
  for _, key in ipairs { p .. ':later', p .. ':expiry' } do
    local first = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')
    if first[2] then
      local wait = math.max(0, tonumber(first[2]) - now)
      soonest = soonest < 0 and wait or math.min(soonest, wait)
    end
  end
  return soonest
end

local function read_one(p, stream, worker)
  local reply = redis.pcall('XREADGROUP', 'GROUP', GROUP, worker, 'COUNT', 1, 'STREAMS', p .. ':' .. stream, '>')
  if not reply or reply.err then
    return nil
  end
  local entry = reply[1][2][1]
  return entry[1], entry[2][2]
end

-- The age in ms of the first entry that nobody has taken: entry ids are the server's milliseconds.
local function head_age(p, stream, now)
  local groups = redis.pcall('XINFO', 'GROUPS', p .. ':' .. stream)
  if groups.err or not groups[1] then
    return nil
  end
  for index = 1, #groups[1], 2 do
    if groups[1][index] == 'last-delivered-id' then
      local head = redis.call('XRANGE', p .. ':' .. stream, '(' .. groups[1][index + 1], '+', 'COUNT', 1)
      return head[1] and now - tonumber(string.match(head[1][1], '^%d+'))
    end
  end
end

local function next_tenant(p, class)
  return redis.call('ZRANGE', p .. ':active:' .. class, 0, 0)[1]
end

local function pick_stream(p, now)
  local choices = {}
  for _, class in ipairs(CLASSES) do
    local tenant = next_tenant(p, class)
    if tenant then
      choices[#choices + 1] = { class, tenant }
    end
  end
  local best, best_score
  for _, choice in ipairs(choices) do
    local stream = 'q:' .. choice[1] .. ':' .. choice[2]
    if #choices == 1 then
      return stream, choice
    end
    local score = ((head_age(p, stream, now) or -1) + 1) * WEIGHTS[choice[1]]
    if not best or score > best_score then
      best, best_score = { stream, choice }, score
    end
  end
  if best then
    return best[1], best[2]
  end
end

-- Give the job at (stream, entry) to the worker. False when there was nothing to run in it.
local function board(p, id, stream, entry, call)
  local job = read(p, id, 'state', 'version', 'epoch', 'seq', 'queue_ttl', 'result_ttl', 'class', 'tenant', 'cost')
  local reference = stream .. ' ' .. entry
  unwait(p, stream)
  if job[1] ~= 'waiting' then
    remove_entry(p, reference)
    return false
  end
  local life = tonumber(job[5]) + tonumber(job[6])
  if tonumber(job[2]) > call.version then
    remove_entry(p, reference)
    enqueue(p, id, 'q:newer:' .. job[2], call.now, life)
    return false
  end
  local epoch, seq = tonumber(job[3]) + 1, tonumber(job[4]) + 1
  redis.call('HINCRBY', job_key(p, id), 'losses', 1)
  redis.call('HSET', job_key(p, id), 'state', 'running', 'epoch', epoch, 'owner', call.worker)
  redis.call('HSETNX', job_key(p, id), 'boarded', call.now)
  redis.call('HINCRBY', p .. ':held', stream, 1)
  redis.call('ZREM', p .. ':expiry', id)
  count(p, 'running', 1)
  charge(p, job[7], job[8], tonumber(job[9]))
  append_event(p, id, seq, cmsgpack.pack { epoch == 1 and 'started' or 'resumed', seq, epoch, call.now, call.worker })
  for _, key in ipairs { job_key(p, id), p .. ':ev:' .. id, p .. ':held', p .. ':n', p .. ':' .. stream } do
    keep(key, life)
  end
  call.boarded[#call.boarded + 1] = id .. ' ' .. epoch .. ' ' .. (stream == 'q:alone' and 1 or 0)
  return true
end

-- The last permitted try of a job that may kill its process rides alone: a worker that is to take it
-- boards nothing else until it is empty, and only one worker at a time makes room.
local function take_alone(p, call)
  if redis.call('EXISTS', p .. ':q:alone') == 0 or not head_age(p, 'q:alone', call.now) then
    return false
  end
  local holder = redis.call('GET', p .. ':clearing')
  if holder and holder ~= call.worker then
    return false
  end
  redis.call('SET', p .. ':clearing', call.worker, 'PX', call.lease)
  if call.on_board == 0 then
    local entry, id = read_one(p, 'q:alone', call.worker)
    if entry then
      board(p, id, 'q:alone', entry, call)
    end
    redis.call('DEL', p .. ':clearing')
  end
  return true
end

local function take_from(p, stream, limit, call)
  local taken = 0
  while taken < limit and #call.boarded < call.capacity do
    local entry, id = read_one(p, stream, call.worker)
    if not entry then
      break
    end
    if board(p, id, stream, entry, call) then
      taken = taken + 1
    end
  end
end

local function take_classes(p, call)
  while #call.boarded < call.capacity do
    local stream, choice = pick_stream(p, call.now)
    if not stream then
      return
    end
    local entry, id = read_one(p, stream, call.worker)
    if entry then
      board(p, id, stream, entry, call)
    else
      redis.call('HDEL', p .. ':n', 'waiting:' .. choice[1] .. ':' .. choice[2])
      deactivate(p, choice[1], choice[2])
    end
  end
end

local function describe(p, line)
  local id, epoch, alone = string.match(line, '^(%S+) (%d+) (%d)$')
  local job = read(p, id, 'epoch', 'seq', 'losses', 'failures', 'seed', 'deadline', 'submitted', 'boarded', 'class',
    'tenant', 'body', 'state')
  if job[1] ~= epoch or job[12] ~= 'running' then
    return nil
  end
  local log = {}
  for index, entry in ipairs(redis.call('XRANGE', p .. ':ev:' .. id, '-', '+')) do
    log[index] = entry[2][2]
  end
  return { id, tonumber(epoch), tonumber(job[2]), tonumber(job[3]), tonumber(job[4]), tonumber(alone), job[5],
    tonumber(job[6]), tonumber(job[7]), tonumber(job[8]), job[9], job[10], job[11], log }
end

local function take_cancels(p, worker)
  local key = p .. ':cancel:' .. worker
  local cancels = redis.call('LRANGE', key, 0, -1)
  redis.call('DEL', key)
  return cancels
end

-- What this request number was answered with, kept so that a repeat whose reply was lost gets it again.
local function remember(p, call, number, cancels)
  local key = p .. ':claims:' .. call.worker
  redis.call('HSET', key, 'number', number, 'boarded', table.concat(call.boarded, '\n'), 'cancels',
    table.concat(cancels, '\n'))
  redis.call('PEXPIRE', key, 20 * call.lease)
end

local function recall(p, worker, number)
  local last = redis.call('HMGET', p .. ':claims:' .. worker, 'number', 'boarded', 'cancels')
  if last[1] ~= number then
    return nil
  end
  local boarded, cancels = {}, {}
  for line in string.gmatch(last[2], '[^\n]+') do
    boarded[#boarded + 1] = line
  end
  for line in string.gmatch(last[3], '[^\n]+') do
    cancels[#cancels + 1] = line
  end
  return boarded, cancels
end

local function last_wake(p)
  local last = redis.call('XREVRANGE', p .. ':wake', '+', '-', 'COUNT', 1)
  return last[1] and last[1][1] or '0-0'
end

local function claim(keys, args)
  local p, worker, number = keys[1], args[1], args[2]
  local call = { now = now_ms(), worker = worker, capacity = tonumber(args[3]), lease = tonumber(args[4]),
    version = tonumber(args[5]), on_board = tonumber(args[6]), boarded = {} }
  sign_of_life(p, call.now, call.lease)
  local boarded, cancels = recall(p, worker, number)
  if not boarded then
    promote_due(p, call.now)
    expire_due(p, call.now)
    cancels = take_cancels(p, worker)
    if call.capacity > 0 and not take_alone(p, call) then
      for version = 2, call.version do
        take_from(p, 'q:newer:' .. version, call.capacity, call)
      end
      take_from(p, 'q:resumed', call.capacity, call)
      take_from(p, 'q:suspect', 1 - tonumber(args[7]), call)
      take_classes(p, call)
    end
    boarded = call.boarded
    if #boarded > 0 or #cancels > 0 then
      remember(p, call, number, cancels)
    end
  end
  local jobs = {}
  for _, line in ipairs(boarded) do
    jobs[#jobs + 1] = describe(p, line)
  end
  return { call.now, next_due(p, call.now), last_wake(p), cancels, jobs }
end
register('claim', claim, { 'allow-oom' })

-- claim: worker, request number, capacity, lease, schema version, jobs on board, carries a suspect (1/0)
-- → {now, ms until the next due entry or -1, last wake id, {"<id> <epoch>" to cancel …}, {job …}}
--   job = {id, epoch, seq, losses, failures, alone (1/0), seed, deadline, submitted, boarded, class, tenant,
--          body, {logged event …}}
local MISREADS = 256

-- An entry that is not the place of a waiting job. A running job's own is read again where the group was
-- lost: it stays, pending, and the job's owner takes it back when it renews.
local function misread(p, state, is_its_own, stream, reference, call)
  call.misreads = call.misreads + 1
  if not state then
    unwait(p, stream)
  end
  if not (state == 'running' and is_its_own) then
    remove_entry(p, reference)
  end
  return false
end

-- Give the job at (stream, entry) to the worker. False when there was nothing to run in it.
local function board(p, id, stream, entry, call)
  local job = read(p, id, 'state', 'entry', 'version', 'epoch', 'seq', 'queue_ttl', 'result_ttl', 'class', 'tenant',
    'cost', 'idem')
  local reference = stream .. ' ' .. entry
  if job[1] ~= 'waiting' or job[2] ~= reference then
    return misread(p, job[1], job[2] == reference, stream, reference, call)
  end
  unwait(p, stream)
  local life = life_of(job[6], job[7])
  if tonumber(job[3]) > call.version then
    call.misreads = call.misreads + 1
    remove_entry(p, reference)
    enqueue(p, id, 'q:newer:' .. job[3], call.now, life)
    return false
  end
  local epoch, seq = tonumber(job[4]) + 1, tonumber(job[5]) + 1
  redis.call('HINCRBY', job_key(p, id), 'losses', 1)
  redis.call('HSET', job_key(p, id), 'state', 'running', 'epoch', epoch, 'owner', call.worker)
  redis.call('HSETNX', job_key(p, id), 'boarded', call.now)
  hold(p, stream, 1)
  count(p, 'running', 1)
  if seq == 1 then
    charge(p, job[8], job[9], tonumber(job[10]))
  end
  append_event(p, id, seq, cmsgpack.pack { seq == 1 and 'started' or 'resumed', seq, epoch, call.now, call.worker })
  look_at(p, id, call.now + DAY_MS)
  keep_job(p, id, job[11], life)
  keep(p .. ':' .. stream, life)
  call.life = math.max(call.life, life)
  call.boarded[#call.boarded + 1] = id .. ' ' .. epoch .. ' ' .. (stream == 'q:alone' and 1 or 0)
  return true
end

local function has_room(call)
  return #call.boarded < call.capacity and call.misreads < MISREADS
end

-- The last permitted try of a job that may kill its process rides alone. An empty worker takes it at once;
-- one that is not empty boards nothing else until it is, but only one worker at a time makes room so.
local function take_alone(p, call)
  local key = p .. ':q:alone'
  if redis.call('EXISTS', key) == 0 then
    return false
  end
  ensure_group(key)
  if not head_of(p, 'q:alone') then
    return false
  end
  if call.on_board == 0 then
    local entry, id = read_one(p, 'q:alone', call.worker)
    redis.call('DEL', p .. ':clearing')
    return board(p, id, 'q:alone', entry, call)
  end
  local clears = redis.call('SET', p .. ':clearing', call.worker, 'PX', call.lease, 'NX')
  if not clears and redis.call('GET', p .. ':clearing') ~= call.worker then
    return false
  end
  redis.call('PEXPIRE', p .. ':clearing', call.lease)
  return true
end

local function take_from(p, stream, limit, call)
  local taken = 0
  while taken < limit and has_room(call) do
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
  while has_room(call) do
    local choice = pick_stream(p, call.now)
    if not choice then
      return
    end
    local entry, id = read_one(p, choice.stream, call.worker)
    if entry then
      board(p, id, choice.stream, entry, call)
    else
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

local function lines(text)
  local found = {}
  for line in string.gmatch(text, '[^\n]+') do
    found[#found + 1] = line
  end
  return found
end

-- The answer to a number that was answered before, nil for a new one. A number from before the last one is
-- a straggler from a connection that broke: nobody hears its answer, so it takes nothing.
local function recall(p, worker, number)
  local last = redis.call('HMGET', p .. ':claims:' .. worker, 'number', 'boarded', 'cancels')
  if not last[1] or tonumber(number) > tonumber(last[1]) then
    return nil
  end
  if last[1] ~= number then
    return {}, {}
  end
  return lines(last[2]), lines(last[3])
end

local function last_wake(p)
  local last = redis.call('XREVRANGE', p .. ':wake', '+', '-', 'COUNT', 1)
  return last[1] and last[1][1] or '0-0'
end

local function take(p, call, may_carry_suspect)
  if call.capacity == 0 or take_alone(p, call) then
    return
  end
  for version = 2, call.version do
    take_from(p, 'q:newer:' .. version, call.capacity, call)
  end
  take_from(p, 'q:resumed', call.capacity, call)
  take_from(p, 'q:suspect', may_carry_suspect and 1 or 0, call)
  take_classes(p, call)
end

local function claim(keys, args)
  local p, worker, number = keys[1], args[1], args[2]
  local call = { now = now_ms(), worker = worker, capacity = tonumber(args[3]), lease = tonumber(args[4]),
    version = tonumber(args[5]), on_board = tonumber(args[6]), boarded = {}, misreads = 0, life = 0 }
  sign_of_life(p, call.now, call.lease)
  local boarded, cancels = recall(p, worker, number)
  if not boarded then
    promote_due(p, call.now)
    expire_due(p, call.now, PROMOTE)
    cancels = take_cancels(p, worker)
    take(p, call, args[7] == '0')
    keep_shared(p, call.life)
    boarded = call.boarded
    remember(p, call, number, cancels)
  end
  local jobs = {}
  for _, line in ipairs(boarded) do
    jobs[#jobs + 1] = describe(p, line)
  end
  local clears = redis.call('GET', p .. ':clearing') == worker
  return { call.now, next_due(p, call.now), last_wake(p), cancels, jobs, clears and 1 or 0 }
end
register('claim', claim, { 'allow-oom' })

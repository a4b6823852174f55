-- submit: id, version, class, tenant, bytes, cost, seed, deadline (ms from now, 0 none), delay (ms),
--         run at (absolute ms, 0 none), queue ttl, result ttl, idempotency hash or '', body hash,
--         prompt tokens if known, output tokens if known, allow unknown model (1/0), body
-- → {'ok', id, now} | {'dup', id, now} | {'conflict', id} | {'full', what, have, limit, retry ms}
--   | {'unknown'} | {'too_long', what, need, limit} | {'invalid', argument, value}
local function find_repeat(p, id, idem, body_hash, now)
  if redis.call('EXISTS', job_key(p, id)) == 1 then
    return { 'dup', id, now }
  end
  local known = idem ~= '' and redis.call('HMGET', p .. ':idem:' .. idem, 'id', 'hash') or {}
  if known[1] then
    return { known[2] == body_hash and 'dup' or 'conflict', known[1], now }
  end
  return nil
end

local function retry_after(p, excess)
  local interval = tonumber(redis.call('HGET', p .. ':n', 'interval') or 1000)
  return math.max(100, math.ceil(interval * excess))
end

local function over_limit(p, tenant, bytes, limits)
  local n = redis.call('HMGET', p .. ':n', 'waiting', 'bytes', 'jobs:' .. tenant)
  local checks = {
    { 'jobs waiting', tonumber(n[1] or 0) + 1, limits[2], 1 },
    { 'bytes of jobs', tonumber(n[2] or 0) + bytes, limits[3], bytes },
    { 'jobs of the tenant', tonumber(n[3] or 0) + 1, limits[4], 1 },
  }
  for _, check in ipairs(checks) do
    local limit = tonumber(check[3] or 0)
    if limit > 0 and check[2] > limit then
      local excess = check[4] == 1 and check[2] - limit or 1
      return { 'full', check[1], check[2], limit, retry_after(p, excess) }
    end
  end
  return nil
end

local function never_fits(prompt, output, limits)
  for index, what in ipairs { 'context', 'pool' } do
    local limit = tonumber(limits[4 + index] or 0)
    local need = prompt + math.max(output, 1)
    if limit > 0 and prompt > 0 and need > limit then
      return { 'too_long', what, need, limit }
    end
  end
  return nil
end

-- A job begins its life: all its fields, its counters, its place in line or among the delayed.
local function begin(p, id, job, due, now)
  local life = due - now + life_of(job.queue_ttl, job.result_ttl)
  redis.call('HSET', job_key(p, id), 'version', job.version, 'class', job.class, 'tenant', job.tenant,
    'bytes', job.bytes, 'cost', job.cost, 'seed', job.seed, 'deadline', job.deadline, 'queue_ttl', job.queue_ttl,
    'result_ttl', job.result_ttl, 'idem', job.idem, 'submitted', now, 'epoch', job.epoch, 'seq', 0, 'tokens', 0,
    'losses', 0, 'failures', 0, 'body', job.body)
  keep_job(p, id, job.idem, life)
  list_job(p, id, now)
  look_at(p, id, patience(due, job.queue_ttl, job.deadline))
  count(p, 'bytes', job.bytes)
  count(p, 'jobs:' .. job.tenant, 1)
  redis.call('HINCRBY', p .. ':n', 'submitted', 1)
  if due > now then
    delay(p, id, due, life)
  else
    enqueue(p, id, 'q:' .. job.class .. ':' .. job.tenant, now, life)
  end
end

-- Overdue jobs are ended here too, so that a queue without workers does not stay full of them.
local function submit(keys, args)
  local refused = malformed(args)
  if refused then
    return refused
  end
  local p, id, tenant, bytes = keys[1], args[1], args[4], tonumber(args[5])
  local now = now_ms()
  local idem, body_hash = args[13], args[14]
  local known = find_repeat(p, id, idem, body_hash, now)
  if known then
    return known
  end
  expire_due(p, now, 8)
  local limits = redis.call('HMGET', p .. ':limits', 'known', 'waiting', 'bytes', 'tenant', 'context', 'pool')
  if not limits[1] and args[17] ~= '1' then
    return { 'unknown' }
  end
  local refusal = never_fits(tonumber(args[15]), tonumber(args[16]), limits) or over_limit(p, tenant, bytes, limits)
  if refusal then
    return refusal
  end
  if idem ~= '' then
    redis.call('HSET', p .. ':idem:' .. idem, 'id', id, 'hash', body_hash)
  end
  begin(p, id, {
    version = args[2], class = args[3], tenant = tenant, bytes = bytes, cost = args[6], seed = args[7],
    deadline = tonumber(args[8]) > 0 and now + tonumber(args[8]) or 0, queue_ttl = args[11], result_ttl = args[12],
    idem = idem, epoch = 0, body = args[18],
  }, math.max(now + tonumber(args[9]), tonumber(args[10])), now)
  return { 'ok', id, now }
end
register('submit', submit)

-- find: idempotency hash, body hash → {'dup'|'conflict', id} or {}. For a key that may stand under the
-- partition count of before the last growth.
register('find', function(keys, args)
  return find_repeat(keys[1], '', args[1], args[2], now_ms()) or {}
end, { 'no-writes' })

-- submit: id, version, class, tenant, bytes, cost, seed, deadline (ms from now, 0 none), delay (ms),
--         run at (absolute ms, 0 none), queue ttl, result ttl, idempotency hash or '', body hash,
--         prompt tokens if known, output tokens if known, allow unknown model (1/0), body
-- → {'ok', id, now} | {'dup', id, now} | {'conflict', id} | {'full', what, have, limit, retry ms}
--   | {'unknown'} | {'too_long', what, need, limit}
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

-- A few of the oldest listed jobs are looked at on each submit, so that the list forgets what has expired.
local function list_job(p, id, now, life)
  for _, old in ipairs(redis.call('ZRANGE', p .. ':jobs', 0, 1)) do
    if redis.call('EXISTS', job_key(p, old)) == 0 then
      redis.call('ZREM', p .. ':jobs', old)
    end
  end
  redis.call('ZADD', p .. ':jobs', now, id)
  keep(p .. ':jobs', life)
end

local function submit(keys, args)
  local p, id, class, tenant, bytes = keys[1], args[1], args[3], args[4], tonumber(args[5])
  local now = now_ms()
  local idem, body_hash = args[13], args[14]
  local known = find_repeat(p, id, idem, body_hash, now)
  if known then
    return known
  end
  local limits = redis.call('HMGET', p .. ':limits', 'known', 'waiting', 'bytes', 'tenant', 'context', 'pool')
  if not limits[1] and args[17] ~= '1' then
    return { 'unknown' }
  end
  local refusal = never_fits(tonumber(args[15]), tonumber(args[16]), limits) or over_limit(p, tenant, bytes, limits)
  if refusal then
    return refusal
  end

  local due = math.max(now + tonumber(args[9]), tonumber(args[10]))
  local queue_until = due + tonumber(args[11])
  local deadline = tonumber(args[8]) > 0 and now + tonumber(args[8]) or 0
  local life = queue_until - now + tonumber(args[12])
  redis.call('HSET', job_key(p, id), 'version', args[2], 'class', class, 'tenant', tenant, 'bytes', bytes,
    'cost', args[6], 'seed', args[7], 'deadline', deadline, 'queue_until', queue_until, 'queue_ttl', args[11],
    'result_ttl', args[12], 'idem', idem, 'submitted', now, 'epoch', 0, 'seq', 0, 'tokens', 0, 'losses', 0,
    'failures', 0, 'body', args[18])
  redis.call('PEXPIRE', job_key(p, id), life)
  if idem ~= '' then
    redis.call('HSET', p .. ':idem:' .. idem, 'id', id, 'hash', body_hash)
    redis.call('PEXPIRE', p .. ':idem:' .. idem, life)
  end
  list_job(p, id, now, life)
  count(p, 'bytes', bytes)
  count(p, 'jobs:' .. tenant, 1)
  redis.call('HINCRBY', p .. ':n', 'submitted', 1)
  redis.call('ZADD', p .. ':expiry', deadline > 0 and math.min(deadline, queue_until) or queue_until, id)
  keep(p .. ':expiry', life)
  if due > now then
    redis.call('HSET', job_key(p, id), 'state', 'delayed')
    redis.call('ZADD', p .. ':later', due, id)
    keep(p .. ':later', life)
    count(p, 'delayed', 1)
    keep(p .. ':n', life)
    wake(p)
  else
    enqueue(p, id, 'q:' .. class .. ':' .. tenant, now, life)
  end
  return { 'ok', id, now }
end
register('submit', submit)

-- find: idempotency hash, body hash → {'dup'|'conflict', id} or {}. For a key that may stand under the
-- partition count of before the last growth.
register('find', function(keys, args)
  return find_repeat(keys[1], '', args[1], args[2], now_ms()) or {}
end)

-- Put a job that was running back in line. losses decides its company: a job that lost its last lease
-- without one new token may have killed its worker; it is a suspect, and its last permitted try rides alone.
local function requeue(p, id, losses, max_losses, now)
  local job = read(p, id, 'queue_ttl', 'result_ttl', 'deadline')
  local stream = losses == 0 and 'q:resumed' or losses >= max_losses - 1 and 'q:alone' or 'q:suspect'
  local life = tonumber(job[1]) + tonumber(job[2])
  for _, key in ipairs { job_key(p, id), p .. ':ev:' .. id } do
    keep(key, life)
  end
  if tonumber(job[3]) > 0 then
    redis.call('ZADD', p .. ':expiry', job[3], id)
    keep(p .. ':expiry', life)
  end
  enqueue(p, id, stream, now, life)
end

-- A dead letter keeps the whole job: what it was, why it ended, who had it last.
local function bury(p, id, reason, now, keep_ms, keep_count)
  local job = read(p, id, 'body', 'class', 'tenant', 'losses', 'failures', 'epoch', 'owner', 'submitted', 'seed',
    'version')
  local letter = redis.call('XADD', p .. ':dead', 'MAXLEN', '~', keep_count, '*', 'id', id, 'reason', reason,
    'body', job[1] or '', 'class', job[2], 'tenant', job[3], 'losses', job[4], 'failures', job[5],
    'attempts', job[6], 'worker', job[7] or '', 'submitted', job[8], 'seed', job[9], 'version', job[10])
  keep(p .. ':dead', keep_ms)
  redis.call('HSET', job_key(p, id), 'dead', letter)
  fail_job(p, id, 'dead_letter', reason, now)
end

-- renew: worker, lease, then for each: id, epoch → {{lost id …}, {"<id> <epoch>" cancelled …}}
-- XCLAIM stands here and nowhere else: with JUSTID, or it would raise delivery counts, and behind the
-- fence, or a job would be stolen back from its next owner.
local function renew(keys, args)
  local p, worker, lease = keys[1], args[1], tonumber(args[2])
  local lost, cancelled = {}, {}
  sign_of_life(p, now_ms(), lease)
  for index = 3, #args, 2 do
    local id, epoch = args[index], args[index + 1]
    local job = read(p, id, 'state', 'epoch', 'owner', 'entry', 'cancel', 'queue_ttl', 'result_ttl')
    if is_owner(job[1], job[2], job[3], epoch, worker) then
      local stream, entry = string.match(job[4], '^(%S+) (%S+)$')
      redis.pcall('XCLAIM', p .. ':' .. stream, GROUP, worker, 0, entry, 'IDLE', 0, 'JUSTID')
      local life = tonumber(job[6]) + tonumber(job[7])
      for _, key in ipairs { job_key(p, id), p .. ':ev:' .. id, p .. ':held', p .. ':n', p .. ':' .. stream, p .. ':jobs' } do
        keep(key, life)
      end
      if job[5] then
        cancelled[#cancelled + 1] = id .. ' ' .. epoch
      end
    else
      lost[#lost + 1] = id
    end
  end
  return { lost, cancelled }
end
register('renew', renew, { 'allow-oom' })

-- reap: lease, most losses, dead letters kept for ms, dead letters kept → {moved, buried, cancelled} or {'quiet'}
local function reap_entry(p, id, reference, args, now)
  local job = read(p, id, 'state', 'entry', 'losses', 'cancel')
  if job[1] ~= 'running' or job[2] ~= reference then
    remove_entry(p, reference)
    return nil
  end
  local losses, max_losses = tonumber(job[3]), tonumber(args[2])
  if job[4] then
    cancel_job(p, id, now)
    return 3
  end
  if losses >= max_losses then
    bury(p, id, losses .. ' leases lost in a row without a new token', now, tonumber(args[3]), tonumber(args[4]))
    return 2
  end
  release(p, reference)
  redis.call('HDEL', job_key(p, id), 'owner')
  redis.call('HINCRBY', p .. ':n', 'reclaimed', 1)
  requeue(p, id, losses, max_losses, now)
  return 1
end

local function reap(keys, args)
  local p, lease, now = keys[1], tonumber(args[1]), now_ms()
  sign_of_life(p, now, lease)
  if redis.call('EXISTS', p .. ':quiet') == 1 then
    return { 'quiet' }
  end
  local totals = { 0, 0, 0 }
  for _, stream in ipairs(redis.call('HKEYS', p .. ':held')) do
    local expired = redis.pcall('XPENDING', p .. ':' .. stream, GROUP, 'IDLE', lease, '-', '+', 512)
    if expired.err then
      expired = {}
    end
    for _, pending in ipairs(expired) do
      local entry = redis.call('XRANGE', p .. ':' .. stream, pending[1], pending[1])
      if entry[1] then
        local what = reap_entry(p, entry[1][2][2], stream .. ' ' .. pending[1], args, now)
        if what then
          totals[what] = totals[what] + 1
        end
      else
        redis.call('XACK', p .. ':' .. stream, GROUP, pending[1])
      end
    end
  end
  return totals
end
register('reap', reap, { 'allow-oom' })

-- tidy: lease, dead letters kept for ms → consumers removed. Consumers of workers long gone, only where
-- this very call sees nothing pending for them (XGROUP DELCONSUMER drops pending entries).
local function tidy(keys, args)
  local p, lease, removed = keys[1], tonumber(args[1]), 0
  for _, stream in ipairs(redis.call('HKEYS', p .. ':held')) do
    local consumers = redis.pcall('XINFO', 'CONSUMERS', p .. ':' .. stream, GROUP)
    for _, fields in ipairs(consumers.err and {} or consumers) do
      local consumer = {}
      for index = 1, #fields, 2 do
        consumer[fields[index]] = fields[index + 1]
      end
      if consumer.pending == 0 and consumer.idle > 10 * lease then
        redis.call('XGROUP', 'DELCONSUMER', p .. ':' .. stream, GROUP, consumer.name)
        removed = removed + 1
      end
    end
  end
  redis.call('XTRIM', p .. ':dead', 'MINID', now_ms() - tonumber(args[2]))
  return removed
end
register('tidy', tidy, { 'allow-oom' })

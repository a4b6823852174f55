-- Leases: renewed by their owners, taken away from those who do not.

-- Put a job that was running back in line. losses decides its company: a job that lost its last lease
-- without one new token may have killed its worker; it is a suspect, and its last permitted try rides alone.
local function requeue(p, id, losses, max_losses, now)
  local job = read(p, id, 'queue_ttl', 'result_ttl', 'deadline', 'idem')
  local stream = losses == 0 and 'q:resumed' or losses >= max_losses - 1 and 'q:alone' or 'q:suspect'
  local life = life_of(job[1], job[2])
  redis.call('HDEL', job_key(p, id), 'owner')
  look_at(p, id, patience(now, job[1], job[3]))
  keep_job(p, id, job[4], life)
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
local function renew_one(p, worker, id, epoch, cancelled)
  local job = read(p, id, 'state', 'epoch', 'owner', 'entry', 'cancel', 'queue_ttl', 'result_ttl', 'idem')
  if not is_owner(job[1], job[2], job[3], epoch, worker) then
    return nil
  end
  local life = life_of(job[6], job[7])
  local stream, entry = split(job[4])
  if stream and hold_entry(p, id, stream, entry, worker) then
    keep(p .. ':' .. stream, life)
  else
    adopt(p, id, job[4], worker, life)
  end
  keep_job(p, id, job[8], life)
  if job[5] then
    cancelled[#cancelled + 1] = id .. ' ' .. epoch
  end
  return life
end

local function renew(keys, args)
  local p, worker, longest = keys[1], args[1], 0
  local lost, cancelled = {}, {}
  sign_of_life(p, now_ms(), tonumber(args[2]))
  for index = 3, #args, 2 do
    local life = renew_one(p, worker, args[index], args[index + 1], cancelled)
    if life then
      longest = math.max(longest, life)
    else
      lost[#lost + 1] = args[index]
    end
  end
  keep_shared(p, longest)
  return { lost, cancelled }
end
register('renew', renew, { 'allow-oom' })

-- reap: lease, most losses, dead letters kept for ms, dead letters kept
-- → {moved, buried, cancelled, mended} or {'quiet'}
local REAP = 256

local function reap_entry(p, id, reference, args, now)
  local job = read(p, id, 'state', 'entry', 'losses', 'cancel')
  if not job[1] then
    release(p, reference)
    return nil
  end
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
  redis.call('HINCRBY', p .. ':n', 'reclaimed', 1)
  requeue(p, id, losses, max_losses, now)
  return 1
end

local function lapsed(p, stream, lease, most)
  local key = p .. ':' .. stream
  if most <= 0 or redis.call('EXISTS', key) == 0 then
    return {}
  end
  local found = redis.pcall('XPENDING', key, GROUP, 'IDLE', lease, '-', '+', most)
  return found.err and {} or found
end

local function reap(keys, args)
  local p, lease, now = keys[1], tonumber(args[1]), now_ms()
  sign_of_life(p, now, lease)
  if redis.call('EXISTS', p .. ':quiet') == 1 then
    return { 'quiet' }
  end
  local totals, left = { 0, 0, 0, 0 }, REAP
  for _, stream in ipairs(redis.call('HKEYS', p .. ':held')) do
    for _, pending in ipairs(lapsed(p, stream, lease, left)) do
      left = left - 1
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
  totals[4] = audit(p, now)
  return totals
end
register('reap', reap, { 'allow-oom' })

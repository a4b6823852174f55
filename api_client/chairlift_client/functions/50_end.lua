-- How an attempt ends. All are fenced by (epoch, owner), and each may be sent twice: the second time
-- answers 'dup', recognised by the note that the first one left.
local function fenced(p, id, epoch, worker)
  local job = read(p, id, 'state', 'epoch', 'owner', 'ended')
  if is_owner(job[1], job[2], job[3], epoch, worker) then
    return 'ok'
  end
  return job[4] == epoch .. ' ' .. worker and 'dup' or 'lost'
end

local function note_end(p, id, epoch, worker)
  redis.call('HSET', job_key(p, id), 'ended', epoch .. ' ' .. worker)
end

-- finish: worker, id, epoch, seq, state (finished | failed | cancelled), event, result or '', tokens used
-- → 'ok' | 'dup' | 'lost' | 'gap'
register('finish', function(keys, args)
  local p, id, seq, now = keys[1], args[2], tonumber(args[4]), now_ms()
  local fence = fenced(p, id, args[3], args[1])
  if fence ~= 'ok' then
    return fence
  end
  local job = read(p, id, 'seq', 'class', 'tenant', 'cost')
  if seq ~= tonumber(job[1]) + 1 then
    return 'gap'
  end
  note_end(p, id, args[3], args[1])
  charge(p, job[2], job[3], tonumber(args[8]) - tonumber(job[4]))
  if args[7] ~= '' then
    redis.call('HSET', job_key(p, id), 'result', args[7])
  end
  end_job(p, id, args[5], seq, args[6], now)
  measure_rate(p, now)
  return 'ok'
end, { 'allow-oom' })

-- fail: worker, id, epoch, reason, most failures, first backoff ms, longest backoff ms, jitter 0..1,
--       dead letters kept for ms, dead letters kept → 'ok' | 'dead' | 'cancelled' | 'dup' | 'lost'
-- A failed attempt whose process lives: tried again later. The jitter comes from the caller, since
-- random numbers in here are the same after every restart.
local function retry_later(p, id, backoff, now)
  local job = read(p, id, 'entry', 'queue_ttl', 'result_ttl', 'deadline', 'idem')
  local due, life = now + math.ceil(backoff), life_of(job[2], job[3])
  release(p, job[1])
  redis.call('HDEL', job_key(p, id), 'owner', 'entry')
  look_at(p, id, patience(due, job[2], job[4]))
  keep_job(p, id, job[5], due - now + life)
  delay(p, id, due, due - now + life)
end

register('fail', function(keys, args)
  local p, id, now = keys[1], args[2], now_ms()
  local fence = fenced(p, id, args[3], args[1])
  if fence ~= 'ok' then
    return fence
  end
  note_end(p, id, args[3], args[1])
  if read(p, id, 'cancel')[1] then
    cancel_job(p, id, now)
    return 'cancelled'
  end
  local failures = redis.call('HINCRBY', job_key(p, id), 'failures', 1)
  redis.call('HSET', job_key(p, id), 'losses', 0)
  if failures >= tonumber(args[5]) then
    bury(p, id, failures .. ' failed attempts, the last: ' .. args[4], now, tonumber(args[9]), tonumber(args[10]))
    return 'dead'
  end
  local longest, jitter = tonumber(args[7]), 0.5 + tonumber(args[8]) / 2
  retry_later(p, id, math.min(longest, tonumber(args[6]) * 2 ^ (failures - 1)) * jitter, now)
  return 'ok'
end, { 'allow-oom' })

-- hand_back: worker, most losses, spent (1/0), dead letters kept for ms, dead letters kept, then for each:
--            id, epoch → for each 'ok' | 'dead' | 'cancelled' | 'dup' | 'lost'
-- The job goes on elsewhere. A drain spends nothing; a suspect stays one. Spent stands for a loss: the
-- engine broke down under a batch, and each job of it is a suspect now.
local function hand_one_back(p, id, max_losses, spent, args, now)
  local job = read(p, id, 'entry', 'losses', 'cancel')
  if job[3] then
    cancel_job(p, id, now)
    return 'cancelled'
  end
  local losses = spent and math.max(1, tonumber(job[2])) or math.max(0, tonumber(job[2]) - 1)
  if losses >= max_losses then
    bury(p, id, losses .. ' attempts in a row ended without a new token', now, tonumber(args[4]), tonumber(args[5]))
    return 'dead'
  end
  release(p, job[1])
  redis.call('HSET', job_key(p, id), 'losses', losses)
  requeue(p, id, losses, max_losses, now)
  return 'ok'
end

register('hand_back', function(keys, args)
  local p, worker, now, answers = keys[1], args[1], now_ms(), {}
  for index = 6, #args, 2 do
    local id, epoch = args[index], args[index + 1]
    local answer = fenced(p, id, epoch, worker)
    if answer == 'ok' then
      note_end(p, id, epoch, worker)
      answer = hand_one_back(p, id, tonumber(args[2]), args[3] == '1', args, now)
    end
    answers[#answers + 1] = answer
  end
  return answers
end, { 'allow-oom' })

-- cancel: id → 'ok' (ended now) | 'asked' (its worker is told) | 'ended' (was over already) | 'absent'
-- The message to the worker names the epoch, so that it cannot hit a later attempt.
local function cancel(p, id, now)
  local job = read(p, id, 'state', 'epoch', 'owner')
  if not job[1] then
    return 'absent'
  end
  if TERMINAL[job[1]] then
    return 'ended'
  end
  if job[1] ~= 'running' then
    cancel_job(p, id, now)
    return 'ok'
  end
  if redis.call('HSETNX', job_key(p, id), 'cancel', 1) == 1 then
    local key = p .. ':cancel:' .. job[3]
    redis.call('RPUSH', key, id .. ' ' .. job[2])
    redis.call('PEXPIRE', key, DAY_MS)
    wake(p)
  end
  return 'asked'
end

register('cancel', function(keys, args)
  return cancel(keys[1], args[1], now_ms())
end, { 'allow-oom' })

-- forget: id → 'ok' (prompt, log and result are gone) | 'asked' (gone as soon as its worker lets go) | 'absent'
register('forget', function(keys, args)
  local p, id = keys[1], args[1]
  local state = read(p, id, 'state')[1]
  if not state then
    return 'absent'
  end
  redis.call('HSET', job_key(p, id), 'forget', 1)
  if TERMINAL[state] then
    erase(p, id)
    return 'ok'
  end
  return cancel(p, id, now_ms())
end, { 'allow-oom' })

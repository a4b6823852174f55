-- How jobs end, on time and out of time.

local function erase(p, id)
  local job = read(p, id, 'idem', 'dead')
  if job[1] and job[1] ~= '' and redis.call('HGET', p .. ':idem:' .. job[1], 'id') == id then
    redis.call('DEL', p .. ':idem:' .. job[1])
  end
  if job[2] then
    redis.call('XDEL', p .. ':dead', job[2])
  end
  redis.call('DEL', job_key(p, id), p .. ':ev:' .. id)
  redis.call('ZREM', p .. ':jobs', id)
end

-- The measured service time of this queue, only while something waits: it is what a full queue's
-- retry-after and a waiting job's ETA are made of.
local function measure_rate(p, now)
  local n = redis.call('HMGET', p .. ':n', 'waiting', 'last_finish', 'busy_since', 'interval')
  if tonumber(n[1] or 0) > 0 and n[2] then
    local elapsed = now - math.max(tonumber(n[2]), tonumber(n[3] or 0))
    local interval = n[4] and (0.9 * tonumber(n[4]) + 0.1 * elapsed) or elapsed
    redis.call('HSET', p .. ':n', 'interval', interval)
  end
  redis.call('HSET', p .. ':n', 'last_finish', now)
end

-- Every way a job ends goes through here: terminal event, counters, and an end for every key of it.
local function end_job(p, id, state, seq, event, now)
  local job = read(p, id, 'state', 'entry', 'bytes', 'tenant', 'result_ttl', 'idem', 'forget')
  leave(p, id, job[1], job[2])
  count(p, 'bytes', -tonumber(job[3]))
  count(p, 'jobs:' .. job[4], -1)
  redis.call('HINCRBY', p .. ':n', 'ended:' .. state, 1)
  keep_shared(p, tonumber(job[5]))
  append_event(p, id, seq, event)
  if job[7] then
    return erase(p, id)
  end
  redis.call('HSET', job_key(p, id), 'state', state, 'finished', now)
  redis.call('HDEL', job_key(p, id), 'entry', 'body')
  local ttl = tonumber(job[5])
  redis.call('PEXPIRE', job_key(p, id), ttl)
  redis.call('PEXPIRE', p .. ':ev:' .. id, ttl)
  if job[6] ~= '' then
    redis.call('PEXPIRE', p .. ':idem:' .. job[6], ttl)
  end
end

local function fail_job(p, id, code, message, now)
  local job = read(p, id, 'seq', 'epoch')
  local seq = tonumber(job[1]) + 1
  end_job(p, id, 'failed', seq, cmsgpack.pack { 'failed', seq, tonumber(job[2]), now, code, message }, now)
end

local function cancel_job(p, id, now)
  local job = read(p, id, 'seq', 'epoch')
  local seq = tonumber(job[1]) + 1
  end_job(p, id, 'cancelled', seq, cmsgpack.pack { 'cancelled', seq, tonumber(job[2]), now }, now)
end

-- Look at the live jobs whose time has come, at most `most` of them. One that runs is its worker's affair.
local function expire_due(p, now, most)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', p .. ':live', '-inf', now, 'LIMIT', 0, most)) do
    local job = read(p, id, 'state', 'deadline', 'queue_ttl')
    if job[1] == 'running' then
      look_at(p, id, now + DAY_MS)
    elseif job[1] == 'waiting' or job[1] == 'delayed' then
      local deadline = tonumber(job[2])
      if deadline > 0 and deadline <= now then
        fail_job(p, id, 'deadline', 'the deadline passed while the job was waiting', now)
      else
        fail_job(p, id, 'queue_timeout', 'not boarded within its queue lifetime of ' .. job[3] .. ' ms', now)
      end
    else
      redis.call('ZREM', p .. ':live', id)
    end
  end
end

-- A few of the listed jobs are looked at on each submit, so that the list forgets what has expired; drawn
-- at random, since the oldest may live longest.
local function list_job(p, id, now)
  for _, other in ipairs(redis.call('ZRANDMEMBER', p .. ':jobs', 4)) do
    if redis.call('EXISTS', job_key(p, other)) == 0 then
      redis.call('ZREM', p .. ':jobs', other)
    end
  end
  redis.call('ZADD', p .. ':jobs', now, id)
end

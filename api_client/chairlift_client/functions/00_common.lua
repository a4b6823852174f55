-- Shared by every operation below. All files of this folder are joined in name order into one library.
--
-- KEYS[1] is always the prefix of one partition, cl:{<namespace>/<model>/<partition>}; every key that an
-- operation touches begins with it, so that one hash tag covers them all. Times are the server's, in ms.
--
--   state      waiting | delayed | running | finished | failed | cancelled
--   epoch      attempts so far; (epoch, owner) is the fence of the running attempt
--   losses     leases lost in a row without one new logged token; counted up at claim, cleared by emit
--   failures   fail calls
--   entry      "<stream> <entry id>" while the job stands in a queue stream, waiting or running
--   due        when a delayed job is to wait in line
--
-- Beside the jobs and their logs: :live, every job that has not ended, by when it has to be looked at;
-- :later, the delayed ones; :held, running jobs by stream; :n, counters; :jobs, the list for people.

local GROUP = 'workers'
local TERMINAL = { finished = true, failed = true, cancelled = true }
local CLASSES = { 'high', 'normal', 'low', 'batch' }
local DAY_MS = 86400000
local MODEL_TTL = 7 * DAY_MS

local function register(name, callback, flags)
  redis.register_function { function_name = 'cl_' .. VERSION .. '_' .. name, callback = callback, flags = flags or {} }
end

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function job_key(p, id)
  return p .. ':job:' .. id
end

local function read(p, id, ...)
  return redis.call('HMGET', job_key(p, id), ...)
end

-- Let a key live at least ms longer; never shorten it.
local function keep(key, ms)
  if redis.call('PTTL', key) < ms then
    redis.call('PEXPIRE', key, ms)
  end
end

-- How long the keys of a live job last. The day on top leaves time to end it by the rules, event and
-- counters and all, where nobody looked at this partition when its queue lifetime ran out.
local function life_of(queue_ttl, result_ttl)
  return tonumber(queue_ttl) + tonumber(result_ttl) + DAY_MS
end

local function keep_job(p, id, idem, life)
  keep(job_key(p, id), life)
  keep(p .. ':ev:' .. id, life)
  if idem ~= '' then
    keep(p .. ':idem:' .. idem, life)
  end
end

-- What is shared by all jobs of the partition lasts as long as the longest of them.
local function keep_shared(p, life)
  if life == 0 then
    return
  end
  for _, name in ipairs { ':live', ':later', ':held', ':n', ':jobs' } do
    keep(p .. name, life)
  end
end

-- A gauge that reaches zero is gone; below zero it cannot be, but where somebody deleted it.
local function count(p, field, delta)
  local value = redis.call('HINCRBY', p .. ':n', field, delta)
  if value <= 0 then
    redis.call('HDEL', p .. ':n', field)
  end
  return value
end

local function append_event(p, id, seq, event)
  redis.call('XADD', p .. ':ev:' .. id, seq .. '-0', 'e', event)
  redis.call('SPUBLISH', p .. ':ch:' .. id, event)
  redis.call('HSET', job_key(p, id), 'seq', seq)
end

local function wake(p)
  redis.call('XADD', p .. ':wake', 'MAXLEN', '~', 16, '*', 'w', '')
  keep(p .. ':wake', DAY_MS)
end

local function look_at(p, id, at)
  redis.call('ZADD', p .. ':live', at, id)
end

-- When a job that waits from `now` on has waited too long.
local function patience(now, queue_ttl, deadline)
  local limit, end_at = now + tonumber(queue_ttl), tonumber(deadline)
  return end_at > 0 and math.min(end_at, limit) or limit
end

-- Redis' own absence must not look like dead workers: the first sign of life after a silence of more
-- than half a lease forbids reclaiming for one lease.
local function sign_of_life(p, now, lease)
  local tick = redis.call('GET', p .. ':tick')
  if tick and now - tonumber(tick) > lease / 2 then
    redis.call('SET', p .. ':quiet', now + lease, 'PX', lease)
  end
  redis.call('SET', p .. ':tick', now, 'PX', DAY_MS)
end

local function is_owner(job_state, job_epoch, job_owner, epoch, worker)
  return job_state == 'running' and job_epoch == epoch and job_owner == worker
end

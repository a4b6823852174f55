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

local GROUP = 'workers'
local TERMINAL = { finished = true, failed = true, cancelled = true }
local CLASSES = { 'high', 'normal', 'low', 'batch' }
local DAY_MS = 86400000

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

local function count(p, field, delta)
  if redis.call('HINCRBY', p .. ':n', field, delta) == 0 then
    redis.call('HDEL', p .. ':n', field)
  end
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

-- The class and tenant of a home stream, nil for resumed, suspect, alone and newer.
local function home_of(stream)
  local class, tenant = string.match(stream, '^q:(%a+):(.+)$')
  if class == 'newer' then
    return nil
  end
  return class, tenant
end

-- A tenant that begins to wait starts at the least served of the others, as in a virtual token counter
-- (Sheng et al., "Fairness in Serving Large Language Models", 2024).
local function activate(p, class, tenant)
  local active = p .. ':active:' .. class
  if redis.call('ZSCORE', active, tenant) then
    return
  end
  local served = tonumber(redis.call('HGET', p .. ':served', class .. ':' .. tenant) or 0)
  local least = redis.call('ZRANGE', active, 0, 0, 'WITHSCORES')
  if least[2] then
    served = math.max(served, tonumber(least[2]))
  end
  redis.call('ZADD', active, served, tenant)
end

local function deactivate(p, class, tenant)
  local active = p .. ':active:' .. class
  local served = redis.call('ZSCORE', active, tenant)
  redis.call('ZREM', active, tenant)
  if redis.call('EXISTS', active) == 0 then
    redis.call('HDEL', p .. ':served', class .. ':' .. tenant)
  elseif served then
    redis.call('HSET', p .. ':served', class .. ':' .. tenant, served)
    keep(p .. ':served', DAY_MS)
  end
end

local function charge(p, class, tenant, tokens)
  if redis.call('ZSCORE', p .. ':active:' .. class, tenant) then
    redis.call('ZINCRBY', p .. ':active:' .. class, tokens, tenant)
  elseif redis.call('HEXISTS', p .. ':served', class .. ':' .. tenant) == 1 then
    redis.call('HINCRBYFLOAT', p .. ':served', class .. ':' .. tenant, tokens)
  end
end

-- Put a job at the end of a queue stream. The group begins at 0, never at $, so that nothing is skipped.
local function enqueue(p, id, stream, now, life)
  local key = p .. ':' .. stream
  if redis.call('EXISTS', key) == 0 then
    redis.call('XGROUP', 'CREATE', key, GROUP, '0', 'MKSTREAM')
  end
  local entry = redis.call('XADD', key, '*', 'id', id)
  keep(key, life)
  redis.call('HSET', job_key(p, id), 'entry', stream .. ' ' .. entry, 'state', 'waiting')
  if redis.call('HINCRBY', p .. ':n', 'waiting', 1) == 1 then
    redis.call('HSET', p .. ':n', 'busy_since', now)
  end
  local class, tenant = home_of(stream)
  if class then
    count(p, 'waiting:' .. class .. ':' .. tenant, 1)
    activate(p, class, tenant)
    keep(p .. ':active:' .. class, life)
  end
  keep(p .. ':n', life)
  wake(p)
end

-- The bookkeeping of a job that stops waiting in a stream.
local function unwait(p, stream)
  count(p, 'waiting', -1)
  local class, tenant = home_of(stream)
  if class then
    local field = 'waiting:' .. class .. ':' .. tenant
    if redis.call('HINCRBY', p .. ':n', field, -1) <= 0 then
      redis.call('HDEL', p .. ':n', field)
      deactivate(p, class, tenant)
    end
  end
end

-- XACK alone never shrinks a stream. An empty one goes as a whole, and its consumers with it; a consumer
-- is never deleted while anything is pending for it, since that would drop the entries.
local function remove_entry(p, entry)
  local stream, entry_id = string.match(entry or '', '^(%S+) (%S+)$')
  if not stream then
    return nil
  end
  local key = p .. ':' .. stream
  if redis.call('EXISTS', key) == 1 then
    redis.pcall('XACK', key, GROUP, entry_id)
    redis.call('XDEL', key, entry_id)
    if redis.call('XLEN', key) == 0 then
      local pending = redis.pcall('XPENDING', key, GROUP)
      if pending.err or pending[1] == 0 then
        redis.call('DEL', key)
      end
    end
  end
  return stream
end

local function release(p, entry)
  local stream = remove_entry(p, entry)
  if stream and redis.call('HINCRBY', p .. ':held', stream, -1) <= 0 then
    redis.call('HDEL', p .. ':held', stream)
  end
  count(p, 'running', -1)
end

-- Leave whatever place the job has now: a stream, the delayed set, or a worker.
local function leave(p, id, state, entry)
  if state == 'waiting' then
    local stream = remove_entry(p, entry)
    if stream then
      unwait(p, stream)
    end
  elseif state == 'delayed' then
    redis.call('ZREM', p .. ':later', id)
    count(p, 'delayed', -1)
  elseif state == 'running' then
    release(p, entry)
  end
  redis.call('ZREM', p .. ':expiry', id)
end

local function erase(p, id)
  local job = read(p, id, 'idem', 'dead')
  if job[1] and job[1] ~= '' then
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

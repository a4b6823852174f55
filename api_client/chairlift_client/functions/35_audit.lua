-- The books against what is there: somebody deletes a queue stream, a group, a set, and jobs that stood in
-- them are in no place that anybody reads. Every reap looks at the next few of the live jobs, round and round,
-- and puts back what it misses; where it misses something it looks further.
local AUDIT = 64
local LONGEST_AUDIT = 256

local function is_pending(p, stream, entry)
  local key = p .. ':' .. stream
  if redis.call('EXISTS', key) == 0 or #redis.call('XINFO', 'GROUPS', key) == 0 then
    return false
  end
  return #redis.call('XPENDING', key, GROUP, entry, entry, 1) == 1
end

local function audit_waiting(p, id, job, now)
  local stream, entry = split(job[2])
  if stands_in(p, id, stream, entry) then
    local class, tenant = home_of(stream)
    if class then
      activate(p, class, tenant)
      keep(p .. ':active:' .. class, life_of(job[3], job[4]))
    end
    return false
  end
  unwait(p, stream)
  enqueue(p, id, stream, now, life_of(job[3], job[4]))
  return true
end

-- The owner may be alive or not: the entry is pending for it again, and its lease begins now.
local function audit_running(p, id, job)
  local stream, entry = split(job[2])
  if redis.call('HEXISTS', p .. ':held', stream) == 0 then
    hold(p, stream, 1)
    keep(p .. ':held', life_of(job[3], job[4]))
  end
  if is_pending(p, stream, entry) then
    return false
  end
  if not hold_entry(p, id, stream, entry, job[5]) then
    adopt(p, id, job[2], job[5], life_of(job[3], job[4]))
  end
  return true
end

local function audit_delayed(p, id, job)
  if redis.call('ZSCORE', p .. ':later', id) then
    return false
  end
  redis.call('ZADD', p .. ':later', job[6], id)
  keep(p .. ':later', life_of(job[3], job[4]))
  return true
end

local function audit_job(p, id, now)
  local job = read(p, id, 'state', 'entry', 'queue_ttl', 'result_ttl', 'owner', 'due')
  if job[1] == 'waiting' then
    return audit_waiting(p, id, job, now)
  elseif job[1] == 'running' then
    return audit_running(p, id, job)
  elseif job[1] == 'delayed' then
    return audit_delayed(p, id, job)
  end
  redis.call('ZREM', p .. ':live', id)
  return false
end

local function audit_from(p, from, now)
  local ids, mended = redis.call('ZRANGE', p .. ':live', from, from + AUDIT - 1), 0
  for _, id in ipairs(ids) do
    if audit_job(p, id, now) then
      mended = mended + 1
    end
  end
  return #ids == AUDIT and from + AUDIT or 0, mended
end

local function audit(p, now)
  local at, total, looked = tonumber(redis.call('GET', p .. ':audit') or 0), 0, 0
  repeat
    local next_at, mended = audit_from(p, at, now)
    at, total, looked = next_at, total + mended, looked + AUDIT
  until mended == 0 or at == 0 or looked >= LONGEST_AUDIT
  redis.call('SET', p .. ':audit', at, 'PX', DAY_MS)
  return total
end

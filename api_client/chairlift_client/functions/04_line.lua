-- Standing in line, and leaving it.

local function split(entry)
  return string.match(entry or '', '^(%S+) (%S+)$')
end

-- Groups begin at 0, never at $, so that nothing is skipped.
local function ensure_group(key)
  if redis.call('EXISTS', key) == 0 then
    redis.call('XGROUP', 'CREATE', key, GROUP, '0', 'MKSTREAM')
  elseif #redis.call('XINFO', 'GROUPS', key) == 0 then
    redis.call('XGROUP', 'CREATE', key, GROUP, '0')
  end
end

local function enqueue(p, id, stream, now, life)
  local key = p .. ':' .. stream
  if redis.call('EXISTS', key) == 0 then
    ensure_group(key)
  end
  local entry = redis.call('XADD', key, '*', 'id', id)
  keep(key, life)
  redis.call('HSET', job_key(p, id), 'entry', stream .. ' ' .. entry, 'state', 'waiting')
  if count(p, 'waiting', 1) == 1 then
    redis.call('HSET', p .. ':n', 'busy_since', now)
  end
  local class, tenant = home_of(stream)
  if class then
    count(p, 'waiting:' .. class .. ':' .. tenant, 1)
    activate(p, class, tenant)
    keep(p .. ':active:' .. class, life)
  end
  keep_shared(p, life)
  wake(p)
end

-- Put a job by until `due`.
local function delay(p, id, due, life)
  redis.call('HSET', job_key(p, id), 'state', 'delayed', 'due', due)
  redis.call('ZADD', p .. ':later', due, id)
  count(p, 'delayed', 1)
  keep_shared(p, life)
  wake(p)
end

-- The first entry that nobody has taken.
local function head_of(p, stream)
  local key = p .. ':' .. stream
  local group = redis.call('EXISTS', key) == 1 and redis.call('XINFO', 'GROUPS', key)[1] or {}
  for index = 1, #group, 2 do
    if group[index] == 'last-delivered-id' then
      local head = redis.call('XRANGE', key, '(' .. group[index + 1], '+', 'COUNT', 1)
      return head[1] and head[1][1]
    end
  end
end

-- The bookkeeping of a job that stops waiting in a stream. The count says when to look whether it was the
-- tenant's last; it does not decide, since somebody may have deleted it.
local function unwait(p, stream)
  count(p, 'waiting', -1)
  local class, tenant = home_of(stream)
  if class and count(p, 'waiting:' .. class .. ':' .. tenant, -1) <= 0 and not head_of(p, stream) then
    deactivate(p, class, tenant)
  end
end

-- XACK alone never shrinks a stream. An empty one goes as a whole, and its consumers with it; a consumer
-- is never deleted while anything is pending for it, since that would drop the entries.
local function remove_entry(p, entry)
  local stream, entry_id = split(entry)
  if not stream then
    return nil
  end
  local key = p .. ':' .. stream
  if redis.call('EXISTS', key) == 1 then
    redis.call('XACK', key, GROUP, entry_id)
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

local function hold(p, stream, delta)
  if redis.call('HINCRBY', p .. ':held', stream, delta) <= 0 then
    redis.call('HDEL', p .. ':held', stream)
  end
end

-- The bookkeeping of a job that stops running.
local function release(p, entry)
  local stream = remove_entry(p, entry)
  if stream then
    hold(p, stream, -1)
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
  redis.call('ZREM', p .. ':live', id)
end

local function stands_in(p, id, stream, entry)
  local found = redis.call('XRANGE', p .. ':' .. stream, entry, entry)
  return found[1] and found[1][2][2] == id
end

-- Make the worker hold the entry of its running job from now on. XCLAIM stands here and nowhere else: with
-- JUSTID, or it would raise delivery counts; and only where the caller has looked at the fence, or a job
-- would be stolen back from its next owner. FORCE, since somebody may have deleted the group or the consumer.
-- False where the entry is gone, or another's (a stream that was deleted counts from the start again).
local function hold_entry(p, id, stream, entry, worker)
  local key = p .. ':' .. stream
  if not stands_in(p, id, stream, entry) then
    return false
  end
  local claimed = redis.pcall('XCLAIM', key, GROUP, worker, 0, entry, 'IDLE', 0, 'FORCE', 'JUSTID')
  return claimed[1] == entry
end

-- A job runs and its stream was deleted under it: it moves to a stream from which nobody boards, so that
-- its lease is seen again.
local function adopt(p, id, reference, worker, life)
  local stream = split(reference)
  if stream then
    hold(p, stream, -1)
  end
  local key = p .. ':q:adopted'
  ensure_group(key)
  local entry = redis.call('XADD', key, '*', 'id', id)
  hold_entry(p, id, 'q:adopted', entry, worker)
  hold(p, 'q:adopted', 1)
  keep(key, life)
  keep_shared(p, life)
  redis.call('HSET', job_key(p, id), 'entry', 'q:adopted ' .. entry)
end

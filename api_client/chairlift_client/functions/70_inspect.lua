-- status: id → {} when absent, else {now, state, class, tenant, submitted, boarded, finished, epoch, losses,
--              failures, seq, tokens, deadline, due, owner, queue position (0 not waiting), eta ms or -1, result}
local function position_of(p, entry)
  local stream, entry_id = string.match(entry or '', '^(%S+) (%S+)$')
  local groups = stream and redis.pcall('XINFO', 'GROUPS', p .. ':' .. stream)
  if not groups or groups.err or not groups[1] then
    return 0
  end
  for index = 1, #groups[1], 2 do
    if groups[1][index] == 'last-delivered-id' then
      return #redis.call('XRANGE', p .. ':' .. stream, '(' .. groups[1][index + 1], entry_id, 'COUNT', 1000)
    end
  end
end

register('status', function(keys, args)
  local p, id = keys[1], args[1]
  local job = read(p, id, 'state', 'class', 'tenant', 'submitted', 'boarded', 'finished', 'epoch', 'losses',
    'failures', 'seq', 'tokens', 'deadline', 'owner', 'entry', 'result')
  if not job[1] then
    return {}
  end
  local position = job[1] == 'waiting' and position_of(p, job[14]) or 0
  local interval = redis.call('HGET', p .. ':n', 'interval')
  local eta = position > 0 and interval and math.ceil(position * tonumber(interval)) or -1
  local due = redis.call('ZSCORE', p .. ':later', id) or '0'
  return { now_ms(), job[1], job[2], job[3], tonumber(job[4]), tonumber(job[5] or 0), tonumber(job[6] or 0),
    tonumber(job[7]), tonumber(job[8]), tonumber(job[9]), tonumber(job[10]), tonumber(job[11]), tonumber(job[12]),
    tonumber(due), job[13] or '', position, eta, job[15] or '' }
end, { 'no-writes' })

-- jobs: offset, count → {{id, state, class, tenant, submitted} …}, newest first
register('jobs', function(keys, args)
  local p, found = keys[1], {}
  for _, id in ipairs(redis.call('ZRANGE', p .. ':jobs', args[1], args[1] + args[2] - 1, 'REV')) do
    local job = read(p, id, 'state', 'class', 'tenant', 'submitted')
    if job[1] then
      found[#found + 1] = { id, job[1], job[2], job[3], tonumber(job[4]) }
    end
  end
  return found
end, { 'no-writes' })

-- counts → {now, {counter, value …}, {class, age of its next head in ms …}}
register('counts', function(keys, args)
  local p, now, ages = keys[1], now_ms(), {}
  for _, class in ipairs(CLASSES) do
    local tenant = next_tenant(p, class)
    local age = tenant and head_age(p, 'q:' .. class .. ':' .. tenant, now)
    if age then
      ages[#ages + 1] = class
      ages[#ages + 1] = age
    end
  end
  return { now, redis.call('HGETALL', p .. ':n'), ages }
end, { 'no-writes' })

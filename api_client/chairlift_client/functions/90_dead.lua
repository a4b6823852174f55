-- dead_list: last letter seen or '-', count → {{letter, field, value …} …}, oldest first
register('dead_list', function(keys, args)
  local from = args[1] == '-' and '-' or '(' .. args[1]
  return redis.call('XRANGE', keys[1] .. ':dead', from, '+', 'COUNT', args[2])
end, { 'no-writes' })

-- dead_drop: letter → removed
register('dead_drop', function(keys, args)
  return redis.call('XDEL', keys[1] .. ':dead', args[1])
end, { 'allow-oom' })

-- dead_retry: letter, queue ttl, result ttl → 'ok' | 'absent' | 'live'
-- The job starts a new life under its id: counters at zero, an empty log, the same seed.
register('dead_retry', function(keys, args)
  local p, now = keys[1], now_ms()
  local found = redis.call('XRANGE', p .. ':dead', args[1], args[1])
  if not found[1] then
    return 'absent'
  end
  local letter = {}
  for index = 1, #found[1][2], 2 do
    letter[found[1][2][index]] = found[1][2][index + 1]
  end
  local state = read(p, letter.id, 'state')[1]
  if state and not TERMINAL[state] then
    return 'live'
  end
  local life = tonumber(args[2]) + tonumber(args[3])
  redis.call('DEL', job_key(p, letter.id), p .. ':ev:' .. letter.id)
  redis.call('HSET', job_key(p, letter.id), 'version', letter.version or 1, 'class', letter.class, 'tenant',
    letter.tenant, 'bytes', #letter.body, 'cost', 0, 'seed', letter.seed, 'deadline', 0, 'queue_until',
    now + tonumber(args[2]), 'queue_ttl', args[2], 'result_ttl', args[3], 'idem', '', 'submitted', now, 'epoch', 0,
    'seq', 0, 'tokens', 0, 'losses', 0, 'failures', 0, 'body', letter.body)
  redis.call('PEXPIRE', job_key(p, letter.id), life)
  list_job(p, letter.id, now, life)
  count(p, 'bytes', #letter.body)
  count(p, 'jobs:' .. letter.tenant, 1)
  redis.call('ZADD', p .. ':expiry', now + tonumber(args[2]), letter.id)
  keep(p .. ':expiry', life)
  enqueue(p, letter.id, 'q:' .. letter.class .. ':' .. letter.tenant, now, life)
  redis.call('XDEL', p .. ':dead', args[1])
  return 'ok'
end)

-- dead_list: last letter seen or '-', count → {{letter, {field, value …}} …}, oldest first; without the bodies,
-- which are large, and private.
register('dead_list', function(keys, args)
  local from = args[1] == '-' and '-' or '(' .. args[1]
  local letters = redis.call('XRANGE', keys[1] .. ':dead', from, '+', 'COUNT', args[2])
  for _, letter in ipairs(letters) do
    for index = 1, #letter[2], 2 do
      letter[2][index + 1] = letter[2][index] ~= 'body' and letter[2][index + 1] or ''
    end
  end
  return letters
end, { 'no-writes' })

-- dead_read: letter → {field, value …}, empty where it is not there
register('dead_read', function(keys, args)
  local found = redis.call('XRANGE', keys[1] .. ':dead', args[1], args[1])
  return found[1] and found[1][2] or {}
end, { 'no-writes' })

-- dead_drop: letter → removed
register('dead_drop', function(keys, args)
  return redis.call('XDEL', keys[1] .. ':dead', args[1])
end, { 'allow-oom' })

-- dead_retry: letter, queue ttl, result ttl → 'ok' | 'dup' | 'absent' | 'live'
-- The job starts a new life under its id: counters at zero, an empty log, the same seed. Epochs go on, since
-- an owner of its former life may still have something to say.
local function open_letter(p, letter)
  local found, fields = redis.call('XRANGE', p .. ':dead', letter, letter), {}
  for index = 1, #(found[1] or { 0, {} })[2], 2 do
    fields[found[1][2][index]] = found[1][2][index + 1]
  end
  return found[1] and fields
end

register('dead_retry', function(keys, args)
  local p, now = keys[1], now_ms()
  local letter = open_letter(p, args[1])
  if not letter then
    return redis.call('EXISTS', p .. ':retried:' .. args[1]) == 1 and 'dup' or 'absent'
  end
  local state = read(p, letter.id, 'state')[1]
  if state and not TERMINAL[state] then
    return 'live'
  end
  redis.call('DEL', job_key(p, letter.id), p .. ':ev:' .. letter.id)
  begin(p, letter.id, {
    version = letter.version or 1, class = letter.class, tenant = letter.tenant, bytes = #letter.body, cost = 0,
    seed = letter.seed, deadline = 0, queue_ttl = args[2], result_ttl = args[3], idem = '', epoch = letter.attempts,
    body = letter.body,
  }, now, now)
  redis.call('XDEL', p .. ':dead', args[1])
  redis.call('SET', p .. ':retried:' .. args[1], letter.id, 'PX', DAY_MS)
  return 'ok'
end)

-- emit: worker, then for each event: id, epoch, seq, new tokens, event → for each: 'ok' | 'dup' | 'lost' | 'gap'
--
-- The fence is (epoch, owner); the seq must be the next one. 'gap' says that the server has lost events
-- (a failover): the worker gives the job up, and the next attempt goes on from the log as it is.
local function emit_one(p, worker, id, epoch, seq, tokens, event)
  local job = read(p, id, 'state', 'epoch', 'owner', 'seq')
  if not is_owner(job[1], job[2], job[3], epoch, worker) then
    return 'lost'
  end
  local last = tonumber(job[4])
  if seq <= last then
    return 'dup'
  end
  if seq ~= last + 1 then
    return 'gap'
  end
  append_event(p, id, seq, event)
  if tokens > 0 then
    redis.call('HINCRBY', job_key(p, id), 'tokens', tokens)
    redis.call('HSET', job_key(p, id), 'losses', 0)
  end
  return 'ok'
end

register('emit', function(keys, args)
  local answers = {}
  for index = 2, #args, 5 do
    answers[#answers + 1] = emit_one(keys[1], args[1], args[index], args[index + 1], tonumber(args[index + 2]),
      tonumber(args[index + 3]), args[index + 4])
  end
  return answers
end, { 'allow-oom' })

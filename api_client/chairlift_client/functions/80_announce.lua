-- Here KEYS[1] is cl:{<namespace>}: what belongs to no partition.
--
-- announce: worker, heartbeat ms, model, fingerprint, partitions, context tokens, pool tokens, takes adapters (0
-- or 1), field, value …
-- → {'ok', partitions} | {'fingerprint', the other}
-- The workers of one model share a fingerprint, since a job may be begun by one and ended by another. The
-- number of partitions only grows; the one before is kept for idempotency keys that stand under it.
local function live_fingerprint(p, worker, model, now)
  for _, other in ipairs(redis.call('ZRANGEBYSCORE', p .. ':workers', now, '+inf')) do
    if other ~= worker then
      local beat = redis.call('HMGET', p .. ':worker:' .. other, 'model', 'fingerprint')
      if beat[1] == model and beat[2] then
        return beat[2]
      end
    end
  end
end

local function announce(keys, args)
  local p, worker, ttl, model, fingerprint = keys[1], args[1], tonumber(args[2]), args[3], args[4]
  local partitions, now = tonumber(args[5]), now_ms()
  local other = live_fingerprint(p, worker, model, now)
  if other and other ~= fingerprint then
    return { 'fingerprint', other }
  end
  local packed = redis.call('HGET', p .. ':models', model)
  local known = packed and cmsgpack.unpack(packed) or { partitions = partitions, previous_partitions = 0 }
  local before = known.previous_partitions or 0
  if partitions > known.partitions then
    before = known.partitions
  else
    partitions = known.partitions
  end
  redis.call('HSET', p .. ':models', model, cmsgpack.pack { fingerprint = fingerprint, partitions = partitions,
    previous_partitions = before, context_tokens = tonumber(args[6]), pool_tokens = tonumber(args[7]),
    adapters = args[8] == '1' })
  keep(p .. ':models', MODEL_TTL)
  redis.call('ZREMRANGEBYSCORE', p .. ':workers', '-inf', now - DAY_MS)
  redis.call('ZADD', p .. ':workers', now + ttl, worker)
  keep(p .. ':workers', DAY_MS)
  redis.call('HSET', p .. ':worker:' .. worker, 'model', model, 'fingerprint', fingerprint, unpack(args, 9))
  redis.call('PEXPIRE', p .. ':worker:' .. worker, ttl)
  return { 'ok', partitions }
end
register('announce', announce, { 'allow-oom' })

-- depart: worker → removed. An orderly stop.
register('depart', function(keys, args)
  redis.call('DEL', keys[1] .. ':worker:' .. args[1])
  return redis.call('ZREM', keys[1] .. ':workers', args[1])
end, { 'allow-oom' })

-- open (KEYS[1] is a partition again): context, pool, most waiting, most bytes, most jobs of a tenant (0: no limit)
-- What submit checks on this shard; written by every worker of the model, gone a week after the last.
register('open', function(keys, args)
  redis.call('HSET', keys[1] .. ':limits', 'known', 1, 'context', args[1], 'pool', args[2], 'waiting', args[3],
    'bytes', args[4], 'tenant', args[5])
  keep(keys[1] .. ':limits', MODEL_TTL)
  return 'ok'
end, { 'allow-oom' })

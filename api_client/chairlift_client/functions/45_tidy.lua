-- tidy: lease, dead letters kept for ms → consumers removed. What has to be done now and then.

-- Consumers of workers long gone, only where this very call sees nothing pending for them (XGROUP DELCONSUMER
-- drops pending entries).
local function remove_idle_consumers(p, stream, lease)
  local key, removed = p .. ':' .. stream, 0
  local consumers = redis.call('EXISTS', key) == 1 and redis.pcall('XINFO', 'CONSUMERS', key, GROUP) or {}
  for _, fields in ipairs(consumers) do
    local consumer = {}
    for index = 1, #fields, 2 do
      consumer[fields[index]] = fields[index + 1]
    end
    if consumer.pending == 0 and consumer.idle > 10 * lease then
      redis.call('XGROUP', 'DELCONSUMER', key, GROUP, consumer.name)
      removed = removed + 1
    end
  end
  return removed
end

-- With no live job there is nothing to count: what the gauges still say stems from jobs whose keys ran out
-- while nobody was here to end them.
local function zero_gauges(p)
  if redis.call('EXISTS', p .. ':live') == 1 then
    return
  end
  for _, field in ipairs(redis.call('HKEYS', p .. ':n')) do
    local name = string.match(field, '^%a+')
    if name == 'waiting' or name == 'delayed' or name == 'running' or name == 'bytes' or name == 'jobs' then
      redis.call('HDEL', p .. ':n', field)
    end
  end
end

local function tidy(keys, args)
  local p, lease, removed = keys[1], tonumber(args[1]), 0
  for _, stream in ipairs(redis.call('HKEYS', p .. ':held')) do
    removed = removed + remove_idle_consumers(p, stream, lease)
  end
  zero_gauges(p)
  redis.call('XTRIM', p .. ':dead', 'MINID', now_ms() - tonumber(args[2]))
  keep(p .. ':limits', MODEL_TTL)
  return removed
end
register('tidy', tidy, { 'allow-oom' })

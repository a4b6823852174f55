-- Fair shares among the tenants of a class, by a virtual token counter (Sheng et al., "Fairness in Serving
-- Large Language Models", 2024): the waiting tenant with the least served tokens is next.

-- The class and tenant of a home stream, nil for resumed, suspect, alone, adopted and newer.
local function home_of(stream)
  local class, tenant = string.match(stream, '^q:(%a+):(.+)$')
  if class == 'newer' then
    return nil
  end
  return class, tenant
end

-- A tenant that begins to wait starts at the least served of the others: idling saves nothing up.
local function activate(p, class, tenant)
  local active = p .. ':active:' .. class
  if redis.call('ZSCORE', active, tenant) then
    return
  end
  local served = tonumber(redis.call('HGET', p .. ':served:' .. class, tenant) or 0)
  local least = redis.call('ZRANGE', active, 0, 0, 'WITHSCORES')
  if least[2] then
    served = math.max(served, tonumber(least[2]))
  end
  redis.call('ZADD', active, served, tenant)
end

-- What a tenant was served is remembered while others wait. Once nobody does, all are even again.
local function deactivate(p, class, tenant)
  local active, served = p .. ':active:' .. class, p .. ':served:' .. class
  local score = redis.call('ZSCORE', active, tenant)
  redis.call('ZREM', active, tenant)
  if redis.call('EXISTS', active) == 0 then
    redis.call('DEL', served)
  elseif score then
    redis.call('HSET', served, tenant, score)
    keep(served, DAY_MS)
  end
end

local function charge(p, class, tenant, tokens)
  local active, served = p .. ':active:' .. class, p .. ':served:' .. class
  if redis.call('ZSCORE', active, tenant) then
    redis.call('ZINCRBY', active, tokens, tenant)
  elseif redis.call('HEXISTS', served, tenant) == 1 then
    redis.call('HINCRBYFLOAT', served, tenant, tokens)
  end
end

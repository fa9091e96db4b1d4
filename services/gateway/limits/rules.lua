-- How a tenant's limits are counted in Redis. The rules are those of rules.py, step by step; why they are so is
-- said there. A test compares both.
--
-- KEYS   holds, held_tokens, requests, tokens, month, settled: those of one tenant, in one hash slot
-- ARGV   the command, and what its function below says
--
-- holds        sorted set: hold id (owner and request) by the end of its lease
-- held_tokens  hash: hold id to "bucket month", the tokens that it holds, and "total" of all months' parts
-- requests, tokens   hash: a bucket's debt at a time; without it the bucket is full
-- month        hash: what was used since its start
-- settled      sorted set: settled hold ids by the time until which they are known
--
-- Every key ends by itself when what it says no longer matters. Times are milliseconds since 1970, of the server.
-- The clock is put before this file: a local function clock_ms().

local HOLDS, HELD_TOKENS, REQUESTS, TOKENS, MONTH, SETTLED = unpack(KEYS)
local MINUTE_MS, PARALLEL_WAIT_MS, SETTLED_MS = 60000, 1000, 120000
local MS_PER_DAY = 86400000
local now = clock_ms()

local function text(number)
  return string.format('%.0f', number)
end

-- Keep a key for this long at least; another gateway may want it longer.
local function keep(key, ms)
  redis.call('PEXPIRE', key, text(math.max(ms, redis.call('PTTL', key), 1)))
end

-- Months in UTC, from days since 1970 and back: Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms",
-- civil_from_days and days_from_civil, whose years begin in March. A month here is a number of months since then.
local function month_of(days)
  local z = days + 719468
  local era = math.floor(z / 146097)
  local day_of_era = z - era * 146097
  local year_of_era = math.floor((day_of_era - math.floor(day_of_era / 1460) + math.floor(day_of_era / 36524)
    - math.floor(day_of_era / 146096)) / 365)
  local day_of_year = day_of_era - (365 * year_of_era + math.floor(year_of_era / 4) - math.floor(year_of_era / 100))
  return (year_of_era + era * 400) * 12 + math.floor((5 * day_of_year + 2) / 153)
end

local function month_start_ms(month)
  local year = math.floor(month / 12)
  local era = math.floor(year / 400)
  local year_of_era = year - era * 400
  local day_of_year = math.floor((153 * (month % 12) + 2) / 5)
  local day_of_era = year_of_era * 365 + math.floor(year_of_era / 4) - math.floor(year_of_era / 100) + day_of_year
  return (era * 146097 + day_of_era - 719468) * MS_PER_DAY
end

local this_month = month_of(math.floor(now / MS_PER_DAY))

local function debt_of(bucket, capacity)
  local kept = redis.call('HMGET', bucket, 'debt', 'at')
  if not kept[1] then
    return 0
  end
  return math.max(0, tonumber(kept[1]) - capacity * math.max(0, now - tonumber(kept[2])))
end

local function owe(bucket, capacity, debt)
  if debt <= 0 then
    redis.call('DEL', bucket)
    return
  end
  redis.call('HSET', bucket, 'debt', text(debt), 'at', text(now))
  redis.call('PEXPIRE', bucket, text(math.ceil(debt / capacity) + 1))
end

local function bucket_wait_ms(debt, cost, capacity)
  return math.max(0, math.ceil((debt + (cost - capacity) * MINUTE_MS) / capacity))
end

local function month_used()
  local kept = redis.call('HMGET', MONTH, 'start', 'used')
  if not kept[1] or tonumber(kept[1]) ~= month_start_ms(this_month) then
    return 0
  end
  return tonumber(kept[2])
end

local function month_held()
  return tonumber(redis.call('HGET', HELD_TOKENS, 'total') or 0)
end

local function hold(id, lease_ms, num_bucket_tokens, num_month_tokens)
  redis.call('ZADD', HOLDS, text(now + lease_ms), id)
  redis.call('HSET', HELD_TOKENS, id, text(num_bucket_tokens) .. ' ' .. text(num_month_tokens))
  redis.call('HINCRBY', HELD_TOKENS, 'total', text(num_month_tokens))
end

-- Returns the tokens that the hold's bucket gave.
local function let_go(id)
  redis.call('ZREM', HOLDS, id)
  local tokens = redis.call('HGET', HELD_TOKENS, id)
  if not tokens then
    return 0
  end
  local num_bucket_tokens, num_month_tokens = tokens:match('^(%d+) (%d+)$')
  redis.call('HDEL', HELD_TOKENS, id)
  -- Redis takes no "-0".
  redis.call('HINCRBY', HELD_TOKENS, 'total', text(0 - tonumber(num_month_tokens)))
  if redis.call('EXISTS', HOLDS) == 0 then
    redis.call('DEL', HELD_TOKENS)
  end
  return tonumber(num_bucket_tokens)
end

local function drop_ended()
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', HOLDS, '-inf', text(now))) do
    let_go(id)
  end
end

local function is_settled(id)
  return tonumber(redis.call('ZSCORE', SETTLED, id) or now) > now
end

local commands = {}

-- ARGV: hold id, lease ms, tokens, then the limits in the order of tenant_limits.Limit, empty for none.
-- Returns nothing for a hold that is known; else whether it may be served, the limit's place in that order and the
-- wait for it, and the standing.
function commands.reserve(id, lease_ms, num_tokens, ...)
  local max_parallel, max_requests, max_tokens, budget = unpack({ ... })
  lease_ms, num_tokens = tonumber(lease_ms), tonumber(num_tokens)
  max_parallel, max_requests = tonumber(max_parallel), tonumber(max_requests)
  max_tokens, budget = tonumber(max_tokens), tonumber(budget)
  if is_settled(id) or redis.call('ZSCORE', HOLDS, id) then
    return {}
  end
  drop_ended()

  local waits, num_held = { 0, 0, 0, 0 }, redis.call('ZCARD', HOLDS)
  local request_debt, token_debt, used, held = 0, 0, 0, month_held()
  local num_bucket_tokens, num_month_tokens = 0, 0
  if max_parallel and num_held >= max_parallel then
    waits[1] = PARALLEL_WAIT_MS
  end
  if max_requests then
    request_debt = debt_of(REQUESTS, max_requests)
    waits[2] = bucket_wait_ms(request_debt, 1, max_requests)
  end
  if max_tokens then
    token_debt = debt_of(TOKENS, max_tokens)
    num_bucket_tokens = math.min(num_tokens, max_tokens)
    waits[3] = bucket_wait_ms(token_debt, num_bucket_tokens, max_tokens)
  end
  if budget then
    used, num_month_tokens = month_used(), num_tokens
    if used + num_tokens > budget then
      waits[4] = month_start_ms(this_month + 1) - now
    elseif used + held + num_tokens > budget then
      waits[4] = PARALLEL_WAIT_MS
    end
  end

  local refused_by = 1
  for limit = 2, 4 do
    if waits[limit] > waits[refused_by] then
      refused_by = limit
    end
  end
  if waits[refused_by] > 0 then
    return { 0, refused_by, waits[refused_by], num_held, request_debt, token_debt, used, held }
  end

  if max_requests then
    request_debt = request_debt + MINUTE_MS
    owe(REQUESTS, max_requests, request_debt)
  end
  if max_tokens then
    token_debt = token_debt + num_bucket_tokens * MINUTE_MS
    owe(TOKENS, max_tokens, token_debt)
  end
  if max_parallel or max_tokens or budget then
    hold(id, lease_ms, num_bucket_tokens, num_month_tokens)
    keep(HOLDS, lease_ms)
    keep(HELD_TOKENS, lease_ms)
    num_held, held = num_held + 1, held + num_month_tokens
  end
  return { 1, 0, 0, num_held, request_debt, token_debt, used, held }
end

-- ARGV: hold id, tokens used, tokens a minute and a month or empty. Returns 0 for what was settled before, else 1.
function commands.settle(id, num_used, max_tokens, budget)
  num_used, max_tokens, budget = tonumber(num_used), tonumber(max_tokens), tonumber(budget)
  if is_settled(id) then
    return 0
  end
  local num_bucket_tokens = let_go(id)
  redis.call('ZREMRANGEBYSCORE', SETTLED, '-inf', text(now))
  redis.call('ZADD', SETTLED, text(now + SETTLED_MS), id)
  redis.call('PEXPIRE', SETTLED, text(SETTLED_MS))
  if max_tokens then
    owe(TOKENS, max_tokens, debt_of(TOKENS, max_tokens) + (num_used - num_bucket_tokens) * MINUTE_MS)
  end
  if budget then
    redis.call('HSET', MONTH, 'start', text(month_start_ms(this_month)), 'used', text(month_used() + num_used))
    redis.call('PEXPIRE', MONTH, text(month_start_ms(this_month + 1) - now))
  end
  return 1
end

-- ARGV: lease ms, then hold ids, each with the tokens that it holds of the month. Returns how many were gone.
function commands.renew(lease_ms, ...)
  local num_gone, renewed = 0, { ... }
  lease_ms = tonumber(lease_ms)
  for index = 1, #renewed, 2 do
    local id = renewed[index]
    if not is_settled(id) then
      if redis.call('ZSCORE', HOLDS, id) then
        redis.call('ZADD', HOLDS, text(now + lease_ms), id)
      else
        num_gone = num_gone + 1
        hold(id, lease_ms, 0, tonumber(renewed[index + 1]))
      end
    end
  end
  if redis.call('EXISTS', HOLDS) == 1 then
    keep(HOLDS, lease_ms)
    keep(HELD_TOKENS, lease_ms)
  end
  return num_gone
end

return commands[ARGV[1]](unpack(ARGV, 2))

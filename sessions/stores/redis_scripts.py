"""The steps that a Redis server takes as one: small Lua scripts, all over keys of one hash slot.

Times are the server's. A missing sealed value is the empty string, since a sealed one never is.
"""

from __future__ import annotations

_NOW = "local t = redis.call('TIME'); local now = t[1] + t[2] / 1000000\n"
_AGE = "redis.call('ZADD', KEYS[2], string.format('%.6f', now), ARGV[1])\n"

#: KEYS blob, ages. ARGV id, milliseconds to live or '', data.
PUT = (
    _NOW
    + """
if ARGV[2] == '' then redis.call('SET', KEYS[1], ARGV[3])
else redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[2]) end
"""
    + _AGE
    + "return 1"
)

#: KEYS blob, ages. ARGV id, milliseconds to live or '', SHA-1 of the data. 0: absent or damaged, so PUT it.
RENEW = (
    _NOW
    + """
local data = redis.call('GET', KEYS[1])
if not data or redis.sha1hex(data) ~= ARGV[3] then return 0 end
if ARGV[2] == '' then redis.call('PERSIST', KEYS[1]) else redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
"""
    + _AGE
    + "return 1"
)

#: KEYS blob, ages. ARGV id, seconds. A blob whose age was lost counts as put now.
DELETE = (
    _NOW
    + """
if redis.call('EXISTS', KEYS[1]) == 0 then redis.call('ZREM', KEYS[2], ARGV[1]); return 0 end
local put = redis.call('ZSCORE', KEYS[2], ARGV[1])
local age = put and math.max(0, now - put) or 0
if age < tonumber(ARGV[2]) then
  if not put then
"""
    + _AGE
    + """
  end
  return 0
end
redis.call('UNLINK', KEYS[1]); redis.call('ZREM', KEYS[2], ARGV[1])
return 1
"""
)

#: KEYS refs, this attempt, names. ARGV milliseconds to remember the attempt, name, old, new, guard's name or
#: '', its value. Sent again after a lost answer, it answers what the first one did, and does nothing.
SWAP = (
    _NOW
    + """
local done = redis.call('GET', KEYS[2])
if done then return tonumber(done) end
local function has(name, sealed) return (redis.call('HGET', KEYS[1], name) or '') == sealed end
local result = 0
if has(ARGV[2], ARGV[3]) and (ARGV[5] == '' or has(ARGV[5], ARGV[6])) then
  result = 1
  if ARGV[4] ~= '' then
    redis.call('HSET', KEYS[1], ARGV[2], ARGV[4]); redis.call('ZADD', KEYS[3], 0, ARGV[2])
    if not redis.call('HGET', KEYS[1], '') then
      redis.call('HSET', KEYS[1], '', string.format('%.6f', now))
    end
  elseif ARGV[3] ~= '' then
    redis.call('HDEL', KEYS[1], ARGV[2]); redis.call('ZREM', KEYS[3], ARGV[2])
  end
end
redis.call('SET', KEYS[2], result, 'PX', ARGV[1])
return result
"""
)

#: KEYS refs. The time that `SWAP` wrote beside the first of them, or now: it goes when they go.
SINCE = (
    _NOW
    + """
local since = redis.call('HGET', KEYS[1], '')
if not since then
  since = string.format('%.6f', now)
  redis.call('HSET', KEYS[1], '', since)
end
return since
"""
)

#: KEYS refs, names. ARGV name and sealed value of each.
HINT = """
for i = 1, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]); redis.call('ZADD', KEYS[2], 0, ARGV[i])
end
return 1
"""

#: A hash has no order, so the names are kept in a sorted set besides, changed in the same steps. Where it is
#: not whole (lost, or the hash was written by other means) it is made anew.
_ORDERED = """
local count = redis.call('HLEN', KEYS[1])
if redis.call('HGET', KEYS[1], '') then count = count - 1 end
if count ~= redis.call('ZCARD', KEYS[2]) then
  redis.call('UNLINK', KEYS[2])
  for _, name in ipairs(redis.call('HKEYS', KEYS[1])) do
    if name ~= '' then redis.call('ZADD', KEYS[2], 0, name) end
  end
end
"""

_WITH_VALUES = """
local found = {}
for _, name in ipairs(names) do
  local sealed = redis.call('HGET', KEYS[1], name)
  if sealed then found[#found + 1] = name; found[#found + 1] = sealed end
end
return found
"""

#: KEYS refs, names. ARGV the first name and the last, as ZRANGEBYLEX takes them, and at most how many.
#: Name and sealed value of each, in order.
FIRST = (
    _ORDERED
    + "local names = redis.call('ZRANGEBYLEX', KEYS[2], ARGV[1], ARGV[2], 'LIMIT', 0, ARGV[3])"
    + _WITH_VALUES
)

#: The same from the last one on, back.
LAST = (
    _ORDERED
    + "local names = redis.call('ZREVRANGEBYLEX', KEYS[2], ARGV[2], ARGV[1], 'LIMIT', 0, ARGV[3])"
    + _WITH_VALUES
)

#: KEYS refs, where to set them aside, names. ARGV milliseconds to keep those, then name and sealed value of
#: each.
REBUILD = """
redis.call('UNLINK', KEYS[3])
if redis.call('EXISTS', KEYS[1]) == 1 then
  redis.call('RENAME', KEYS[1], KEYS[2])
  redis.call('PEXPIRE', KEYS[2], ARGV[1])
end
for i = 2, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]); redis.call('ZADD', KEYS[3], 0, ARGV[i])
end
return 1
"""

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

#: KEYS refs, this attempt. ARGV milliseconds to remember the attempt, name, old, new, guard's name or '',
#: its value. Sent again after a lost answer, it answers what the first one did, and does nothing.
SWAP = """
local done = redis.call('GET', KEYS[2])
if done then return tonumber(done) end
local function has(name, sealed) return (redis.call('HGET', KEYS[1], name) or '') == sealed end
local result = 0
if has(ARGV[2], ARGV[3]) and (ARGV[5] == '' or has(ARGV[5], ARGV[6])) then
  result = 1
  if ARGV[4] ~= '' then redis.call('HSET', KEYS[1], ARGV[2], ARGV[4])
  elseif ARGV[3] ~= '' then redis.call('HDEL', KEYS[1], ARGV[2]) end
end
redis.call('SET', KEYS[2], result, 'PX', ARGV[1])
return result
"""

#: KEYS refs, where to set them aside. ARGV milliseconds to keep those, then name and sealed value of each.
REBUILD = """
if redis.call('EXISTS', KEYS[1]) == 1 then
  redis.call('RENAME', KEYS[1], KEYS[2])
  redis.call('PEXPIRE', KEYS[2], ARGV[1])
end
for i = 2, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
return 1
"""

-- table_read: rows of a shared table, unless the caller has this version.
-- KEYS: 1 rows, 2 version      ARGV: 1 version that the caller has
-- Returns: {version} or {version, key, value, ...}.   Reads only.
local version = redis.call('GET', KEYS[2]) or 'empty'
if version == ARGV[1] then return {version} end
local out = redis.call('HGETALL', KEYS[1])
table.insert(out, 1, version)
return out

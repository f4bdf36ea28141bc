-- The highest fencing number that each resource has been claimed or written with.
CREATE TABLE IF NOT EXISTS redislock_fences (
  resource text PRIMARY KEY,
  fence    bigint NOT NULL
);

-- The rows that are locked while handlers run. Until expires, value is a done marker.
CREATE TABLE IF NOT EXISTS redislock_locks (
  key     text PRIMARY KEY,
  value   text,
  expires timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX IF NOT EXISTS redislock_locks_expires ON redislock_locks (expires);

-- What each session last asked for. It says whose a locked row is, which the row itself can't before the commit.
CREATE UNLOGGED TABLE IF NOT EXISTS redislock_holders (
  pid   integer PRIMARY KEY,
  key   text NOT NULL,
  value text NOT NULL
);

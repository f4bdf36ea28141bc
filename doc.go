// Package redislock runs asynq tasks under a lock in Redis, so that one handler at a time works on one thing, across every
// worker on every host.
//
//	mux := asynq.NewServeMux()
//	mux.Use(redislock.Middleware(rdb, redislock.WithDoneFor(12*time.Hour)))
//
// The lock's name is derived from each task's type and payload (WithKey changes that). Before the handler runs, the
// middleware takes the lock with SET NX PX and a random token; while it runs, the lock is extended; afterwards the lock is
// released if it is still this holder's. A task that finds the lock taken is dropped, put back, kept waiting or archived, as
// the Policy says. Wrap the server's configuration in ServerConfig, so that a task put back does not count as a failure.
//
// # What is promised
//
// While Redis keeps its data, no process is paused for longer than its lock's validity, and handlers return within a tenth of the
// TTL once their lock is lost, two handlers of one key never run at once. No task is deleted without having run, except where
// the policy or a done marker says so. A handler is
// told when its lock is lost: its context ends with a cause that matches ErrLost, before Redis could have given the key to
// somebody else if Redis is out of reach, and otherwise within a third of the TTL. A lock outlives a killed process by at
// most one TTL.
//
// # What is not promised
//
// A process that is paused past the TTL (a stopped virtual machine, a very long garbage collection) wakes up and can touch
// the outside world before its context says stop; Lock.Check right before a side effect makes that window small, not zero.
// WithFencing lets what is written to refuse such a holder; the pgfence module checks its numbers in PostgreSQL, and has a lock
// inside the database for work where a late write would corrupt data.
// The local clock must run while the process does: a machine that was suspended counts as paused. A failover or a flush of
// Redis can lose a lock and with it the exclusion. WithFailOpen gives up exclusion while Redis is unavailable.
//
// Skip, the default policy for tasks with equal type and payload, treats a copy as done while its holder still runs: if that
// holder then fails for good, or is killed and its task is not recovered, its copies are gone too. Retry, with WithDoneFor,
// makes the copies stand by instead.
//
// A lock alone does not make fast work run once: a copy that arrives after the release finds the lock free. WithDoneFor
// leaves a marker that answers for the time after.
//
// # Timing
//
// A lock is valid from before its request was sent until nine tenths of the TTL have passed on this process's monotonic clock;
// no host's clock is ever compared with another's. It is extended every TTL/3, and after a failed call again every max(TTL/30,
// 50 ms); where a Locker holds a hundred locks or more, together with others that are due within TTL/60. An acquire that takes
// longer than TTL/4 is given back. A handler's return waits at most min(2 s, TTL/10) for its release, which then ends in the
// background. When a task's context ends, because of a timeout, a cancellation, a lost lease or a shutdown, asynq hands the task
// on while the handler may still be running; its lock is kept for up to the grace period, and the second delivery of the same
// task is put back until the lock is free. Keep a task's Timeout above twice the TTL, and the TTL at 30 s or less, so that a
// task which asynq recovers from a crashed worker, one to two minutes after the crash, does not meet its own dead lock.
//
// An acquire runs in the caller's goroutine where it ends in time by itself: with a TTL of 10 s or more, on a *redis.Client that
// has ContextTimeoutEnabled, or a ReadTimeout of at most TTL/4, by which it may then take longer while Redis hangs. The end of a
// context is noticed when it returns, unless that is a deadline which was known before. With ContextTimeoutEnabled, a handler's
// release does so, too. Either may give up a tenth of its time earlier while it waits for a connection or to try again. Other
// calls run in goroutines of their own, which nobody waits for longer than said here.
//
// # Retries
//
// asynq archives a task on its last attempt (and one with MaxRetry(0) on its first) for any error, whatever ServerConfig
// says. There a task that would be put back waits in its worker slot instead, until the lock is free or its deadline near. Such
// waiters are not limited in number: many MaxRetry(0) tasks of one key can fill a worker.
package redislock

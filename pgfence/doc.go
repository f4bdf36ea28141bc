// Package pgfence keeps PostgreSQL right where a lock with a TTL can't. A holder that was paused past its TTL wakes up and
// writes although somebody else has the lock by then. Two things stop it: a resource that refuses a lower fencing number, and a
// lock inside the database itself.
//
// # Fencing
//
// A handler under redislock.WithFencing has a number that is higher than that of every holder before it. It claims what it will
// write to, and guards each writing transaction:
//
//	fence, _ := lock.Fence()
//	if err := pgfence.Claim(ctx, pool, "account:7", fence); err != nil {
//		return err // ErrStale: a later holder has been there
//	}
//	… // the work
//	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
//		if err := pgfence.Guard(ctx, tx, "account:7", fence); err != nil {
//			return err
//		}
//		_, err := tx.Exec(ctx, "UPDATE accounts SET balance = $1 WHERE id = 7", balance)
//		return err
//	})
//
// Claim shuts out older holders from the start of the work on, whenever they write. Without it, the first write does. Guard holds
// the resource's row until its transaction ends: a newer holder's Claim waits for that, and a transaction that it has overtaken
// can't commit. The same in one statement, for those who write their own SQL; it changes no row when the number is stale:
//
//	WITH guard AS (
//	  INSERT INTO redislock_fences AS f (resource, fence) VALUES ('account:7', $1)
//	  ON CONFLICT (resource) DO UPDATE SET fence = excluded.fence WHERE f.fence <= excluded.fence
//	  RETURNING fence
//	)
//	UPDATE accounts SET balance = $2 WHERE id = 7 AND EXISTS (SELECT FROM guard)
//
// Guard works at every isolation level. Under repeatable read and serializable, a transaction that has been overtaken gets ErrStale
// or a serialization failure, and a newer holder's may get the latter as well, to be tried again. A row of redislock_fences may be deleted when nobody can write to its resource any more.
//
// # The row lock
//
// Middleware and New run a handler while a transaction holds its lock's row with SELECT … FOR UPDATE. What the handler writes with
// the transaction that Tx returns is committed with its result: all of it and the done marker of WithDoneFor when the handler
// returns nil, nothing otherwise. So no two transactions hold a lock, whatever a clock, a pause or a network does, and done once is exact. A handler that has lost
// its lock may still run, but it can't write in its transaction.
// Without WithDoneFor, work whose commit nobody has confirmed may be done again. What the handler does outside the transaction
// is no safer than under any other lock.
//
//	mux.Use(pgfence.Middleware(pool, redislock.WithDoneFor(12*time.Hour)))
//	…
//	func handle(ctx context.Context, task *asynq.Task) error {
//		tx, _ := pgfence.Tx(ctx)
//		_, err := tx.Exec(ctx, "UPDATE accounts SET balance = balance + 5 WHERE id = 7")
//		return err
//	}
//
// KeyFuncs, policies, events and the rest are those of redislock. A task that finds the row locked is told at once
// (SKIP LOCKED), and its policy decides; nobody waits in the database. What differs:
//
//   - A commit that fails is the task's result, although its handler returned nil.
//   - A lock that is lost takes the work along: it is rolled back. Release by hand rolls back as well.
//   - The lock of a killed process is free as soon as PostgreSQL sees its connection closed, which it does not before a statement
//     that is running has ended. TTL only counts where a host vanishes or a process is stopped.
//   - A statement that is under way is not watched: over a network that has gone silent it ends with its context, or with the
//     patience of TCP.
//   - A handler that ends the transaction by SQL of its own (COMMIT, ROLLBACK) fails, and what it has committed stays. A role or
//     search_path that it sets for the transaction must still reach the tables of this package at its end.
//   - ForceRelease ends the holder's session, which takes the right to (pg_signal_backend, or the same user).
//
// # Timeouts
//
// idle_in_transaction_session_timeout is set to the TTL, for the lock's transaction only. A living holder is asked for a sign of
// life every TTL/3, so that a long job between two statements does not idle; a holder that is paused, cut off or gone
// idles, PostgreSQL ends its session after one TTL, and its work is rolled back.
//
// lock_timeout is not touched in the handler's transaction: its own statements wait for other rows as long as yours would. Nothing
// else here waits for a lock but Claim and Guard, for a transaction that holds the resource: bound them with ctx, or with SET
// LOCAL lock_timeout in the transaction of Guard. A try at a lock ends after TTL/4.
//
// statement_timeout and, from PostgreSQL 17 on, transaction_timeout hold for the handler's statements and transaction as they
// are set for the user: a transaction_timeout must be longer than the longest job.
//
// An open transaction keeps VACUUM from removing what has died since it began, in the whole database. The row lock is for jobs of
// minutes; for hours, use fencing.
//
// # Connections
//
// pgx closes the connection of a call whose context ends before the call does, and the lock and its work are lost with it: give
// a statement that may take too long a statement_timeout rather than a context of its own.
//
// A handler under a row lock has a connection for as long as it runs. One that gets none within TTL/4 is put back like one whose
// lock store is unavailable. Through PgBouncer, use session pooling: transaction pooling was not tested.
package pgfence

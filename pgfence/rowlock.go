package pgfence

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/hibiken/asynq"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"example.com/redislock"
	"example.com/redislock/internal/store"
)

// Middleware is New and Locker.Middleware in one. It panics where New returns an error, as asynq does for mistakes at set-up.
// To shut the locks down in order, use New and keep the Locker.
func Middleware(pool *pgxpool.Pool, opts ...redislock.Option) asynq.MiddlewareFunc {
	l, err := New(pool, opts...)
	if err != nil {
		panic(err.Error())
	}
	return l.Middleware
}

// New returns a Locker whose locks are rows of a PostgreSQL database (tested with 15) that Migrate has prepared. Each lock that is
// held has a connection of the pool and an open transaction on it, which Tx returns: it commits, together with the done marker of
// WithDoneFor, when the handler returns nil, and is rolled back otherwise. Give the pool at least as many connections as the server
// runs handlers, and those that the handlers need besides.
//
// The options are those of redislock.New, but for WithFencing and WithFailOpen, which make no sense here. WithTTL is how long a
// transaction may idle before PostgreSQL ends it: the watchdog keeps that of a living holder from idling. New does not talk to the
// database.
func New(pool *pgxpool.Pool, opts ...redislock.Option) (*redislock.Locker, error) {
	if pool == nil {
		return nil, errors.New("pgfence: configure: the pool is nil")
	}
	return redislock.NewOn(rowStore{pool}, opts...)
}

// Tx returns the transaction that the handler, or the function given to Do, runs in; ok is false when it runs without a row lock.
// It ends with the handler: its own Commit and Rollback only return an error, Begin gives a transaction within it, on a savepoint.
// Like any pgx.Tx it is for one goroutine at a time. Read rows to their end before work that takes long: the connection can't
// be watched meanwhile. After Conn or LargeObjects it is not watched any more, must not idle for longer than the TTL, is not asked
// by Lock.Check, and does not return to the pool. Once the lock has ended, Conn returns nil and all else an error.
func Tx(ctx context.Context) (tx pgx.Tx, ok bool) {
	tx, ok = ctx.Value(txContextKey{}).(*watchedTx)
	return tx, ok
}

// rowStore keeps locks as locked rows.
type rowStore struct{ pool *pgxpool.Pool }

func (rowStore) Name() string        { return "PostgreSQL" }
func (rowStore) Transactional() bool { return true }

// Bulk can't be: each lease has a connection of its own.
func (rowStore) Bulk() store.Bulk { return nil }

func (s rowStore) Same(other store.Store) bool { return s == other }

const (
	// publish makes the row if there is none, and says who is about to lock it, for those who will find it locked.
	publish = `WITH lock AS (
  INSERT INTO redislock_locks (key) SELECT $1 WHERE NOT EXISTS (SELECT FROM redislock_locks WHERE key = $1) ON CONFLICT DO NOTHING
)
INSERT INTO redislock_holders (pid, key, value) VALUES (pg_backend_pid(), $1, $2)
ON CONFLICT (pid) DO UPDATE SET key = excluded.key, value = excluded.value`

	// lockRow locks the row unless it is locked, or has a done marker, and does not wait.
	// It returns the transaction that has it.
	lockRow = `SELECT pg_current_xact_id()::text FROM redislock_locks
WHERE key = $1 AND (value IS NULL OR expires <= clock_timestamp()) FOR UPDATE SKIP LOCKED`

	// sameTransaction fails, with the text that is no boolean, where SQL of the handler has ended the transaction and begun another.
	sameTransaction = `SELECT CASE WHEN xact = $1 THEN true ELSE ('another transaction, ' || xact || ', than the one with the lock')::boolean END
FROM (SELECT coalesce(pg_current_xact_id_if_assigned()::text, 'without a number') AS xact) now`

	// held finds the sessions that have a row locked: xmax is the transaction that has, and each transaction holds a lock on itself.
	held = `FROM redislock_locks l
LEFT JOIN pg_locks x ON x.locktype = 'transactionid' AND x.granted AND x.mode = 'ExclusiveLock' AND x.transactionid = l.xmax
LEFT JOIN redislock_holders h ON h.pid = x.pid AND h.key = l.key
WHERE l.key = $1`

	// read returns the done marker, or else what the holder has published.
	read = `SELECT CASE WHEN l.value IS NOT NULL AND l.expires > clock_timestamp() THEN l.value ELSE h.value END ` + held

	markDone = `UPDATE redislock_locks SET value = $2, expires = clock_timestamp() + make_interval(secs => $3) WHERE key = $1`

	// sweep removes rows that were new, or whose marker ended, an hour ago. It spares the one that this session has published last: who found that
	// locked would take the sweeper for its holder.
	sweep = `DELETE FROM redislock_locks WHERE key IN (
  SELECT key FROM redislock_locks WHERE expires < now() - interval '1 hour'
    AND key NOT IN (SELECT key FROM redislock_holders WHERE pid = pg_backend_pid())
  ORDER BY expires LIMIT 100 FOR UPDATE SKIP LOCKED)`
	sweepHolders = `DELETE FROM redislock_holders WHERE pid NOT IN (SELECT pid FROM pg_stat_activity)`

	// sweepOdds makes one release in so many sweep.
	sweepOdds = 32
)

// Claim locks the row of a key in a transaction that stays open. It looks before it writes: what copies that come again and again
// write could not be vacuumed while transactions are open.
func (s rowStore) Claim(ctx context.Context, r store.Request) (store.Claim, error) {
	ctx, cancel := context.WithDeadline(ctx, r.Until)
	defer cancel()
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return store.Claim{}, failure("acquire lock", r.Key, fmt.Errorf("get a connection of the pool: %w", err))
	}
	l := &lease{pooled: conn, conn: conn.Conn(), key: r.Key, ttl: r.TTL}
	present, err := look(ctx, conn, r.Key)
	for range 3 { // a row that is neither ours nor anybody's has just been freed or swept
		if err != nil || present != "" {
			break
		}
		sent := time.Now()
		var locked bool
		if locked, present, err = l.lock(ctx, r); locked {
			return store.Claim{Lease: l, Sent: sent}, nil
		}
	}
	if err != nil {
		l.discard()
		return store.Claim{}, failure("acquire lock", r.Key, err)
	}
	conn.Release()
	return store.Claim{}, &store.Taken{Value: present, Unknown: present == ""}
}

// look returns the done marker or the holder's value, "" for neither.
func look(ctx context.Context, db interface {
	QueryRow(context.Context, string, ...any) pgx.Row
}, key string) (string, error) {
	var found *string
	err := db.QueryRow(ctx, read, key).Scan(&found)
	if errors.Is(err, pgx.ErrNoRows) {
		return "", nil
	}
	if err != nil || found == nil {
		return "", err
	}
	return *found, nil
}

// Read returns the done marker or the holder's value.
func (s rowStore) Read(ctx context.Context, key string) (value string, ok bool, err error) {
	value, err = look(ctx, s.pool, key)
	if err != nil {
		return "", false, failure("read lock", key, err)
	}
	return value, value != "", nil
}

// Free ends the session of the holder and removes a done marker. That this session once had the key must not make it look like the
// holder meanwhile.
func (s rowStore) Free(ctx context.Context, key string) error {
	err := s.pool.AcquireFunc(ctx, func(conn *pgxpool.Conn) error {
		for _, q := range []struct {
			sql  string
			args []any
		}{
			{`DELETE FROM redislock_holders WHERE pid = pg_backend_pid()`, nil},
			{`SELECT pg_terminate_backend(x.pid) ` + held + ` AND x.pid IS NOT NULL`, []any{key}},
			{`DELETE FROM redislock_locks WHERE key IN (
  SELECT key FROM redislock_locks WHERE key = $1 AND value IS NOT NULL FOR UPDATE SKIP LOCKED)`, []any{key}},
		} {
			if _, err := conn.Exec(ctx, q.sql, q.args...); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return failure("force release of lock", key, err)
	}
	return nil
}

// lease is a connection with an open transaction that has the row locked.
type lease struct {
	pooled *pgxpool.Conn
	conn   *pgx.Conn // of pooled, which forgets it when it is released
	key    string
	ttl    time.Duration
	tx     pgx.Tx
	xact   string // the number of tx
	owner  store.Owner
	turns  turns
}

// lock tries once. Without the lock it returns the done marker or the holder's value, or neither, and no transaction is open.
func (l *lease) lock(ctx context.Context, r store.Request) (locked bool, present string, err error) {
	ask := &pgx.Batch{}
	ask.BeginTx(pgx.TxOptions{})
	ask.Queue(publish, r.Key, r.Value)
	ask.Queue("commit") // for all to see
	ask.Queue("begin isolation level read committed read write")
	ask.Queue(fmt.Sprintf("set local idle_in_transaction_session_timeout = %d", min(r.TTL.Milliseconds(), math.MaxInt32)))
	ask.Queue(lockRow, r.Key).QueryRow(func(row pgx.Row) error {
		err := row.Scan(&l.xact)
		locked = err == nil
		if errors.Is(err, pgx.ErrNoRows) {
			return nil
		}
		return err
	})
	results := l.conn.SendBatch(ctx, ask)
	err = results.Close()
	if l.tx = results.Tx(); err != nil || locked {
		return err == nil, "", err
	}
	if present, err = look(ctx, l.conn, r.Key); err == nil {
		err = l.tx.Rollback(ctx)
	}
	return false, present, err
}

// Bind puts the transaction into the context.
func (l *lease) Bind(ctx context.Context, owner store.Owner) context.Context {
	l.owner = owner
	return context.WithValue(ctx, txContextKey{}, &watchedTx{Tx: l.tx, lease: l})
}

// Extend asks the connection for a sign of life, which keeps the transaction from idling. One that the handler uses gives that
// anyway, and can't be asked.
func (l *lease) Extend(ctx context.Context) error {
	for !l.turns.tryWatch() {
		watching := l.turns.underWatch()
		if watching == nil {
			return nil
		}
		select {
		case <-watching:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	// Not with the asker's context, whose end would close the connection: it may be that of an impatient Check.
	ping, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.ttl*2/3)
	defer cancel()
	err := l.conn.Ping(ping)
	closed := l.conn.IsClosed()
	l.turns.watched()
	if err != nil && closed {
		return store.Gone("its connection to PostgreSQL is lost: " + err.Error())
	}
	return err
}

const (
	commitTime   = 30 * time.Second // for a commit to be confirmed
	rollbackTime = 2 * time.Second  // closing the connection does as well
)

// Release commits the work with its done marker, or rolls it back, and returns the connection to the pool.
func (l *lease) Release(ctx context.Context, end store.End) (work, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), commitTime)
	defer cancel()
	if watching := l.turns.close(); watching != nil {
		patience, cancel := context.WithTimeout(ctx, rollbackTime)
		defer cancel()
		select {
		case <-watching:
		case <-patience.Done():
			l.hangUp()
			<-watching
		}
	}
	idle := l.turns.abandon(l.discard)
	if !idle {
		l.hangUp()
	}
	if !end.Succeeded || !end.Held {
		if idle {
			l.GiveBack(ctx)
		}
		return nil, nil
	}
	if why := l.uncommittable(idle); why != "" {
		if idle {
			l.discard()
		}
		return fmt.Errorf("redislock: commit under lock %s: the handler returned nil, and yet %s", l.key, why), nil
	}
	if err := l.commit(ctx, end); err != nil {
		unknown := l.conn.IsClosed()
		l.discard()
		if unknown {
			work = fmt.Errorf("redislock: commit under lock %s: nobody knows whether it took effect: %w", l.key, err)
			return work, fmt.Errorf("%w: %w", redislock.ErrUnavailable, work)
		}
		return fmt.Errorf("redislock: commit under lock %s: %w", l.key, err), nil
	}
	if l.turns.unwatched { // somebody may still have the connection
		l.discard()
		return nil, nil
	}
	if rand.N(sweepOdds) == 0 {
		for _, sql := range []string{sweep, sweepHolders} {
			_, _ = l.conn.Exec(ctx, sql) // there is always a next time
		}
	}
	l.pooled.Release()
	return nil, nil
}

// uncommittable returns why work that succeeded can't be committed.
func (l *lease) uncommittable(idle bool) string {
	if !idle {
		return "rows or a call of its transaction are still open"
	}
	switch l.conn.PgConn().TxStatus() {
	case 'T':
		return ""
	case 'E':
		return "an error has aborted the transaction"
	}
	return "the transaction has ended, by a statement of its own or with the connection"
}

// commit commits, together with the done marker.
func (l *lease) commit(ctx context.Context, end store.End) error {
	batch := &pgx.Batch{}
	batch.Queue(sameTransaction, l.xact)
	if end.Marker != "" {
		batch.Queue(markDone, l.key, end.Marker, end.DoneFor.Seconds())
	}
	batch.Queue("commit").Exec(func(tag pgconn.CommandTag) error {
		if tag.String() != "COMMIT" {
			return pgx.ErrTxCommitRollback
		}
		return nil
	})
	return l.conn.SendBatch(ctx, batch).Close()
}

// GiveBack rolls back.
func (l *lease) GiveBack(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, rollbackTime)
	defer cancel()
	if l.turns.unwatched || l.conn.IsClosed() || l.tx.Rollback(ctx) != nil {
		l.discard()
		return
	}
	l.pooled.Release()
}

// hangUp ends the call that is under way, of whoever it is.
func (l *lease) hangUp() { _ = l.conn.PgConn().Conn().Close() }

// discard closes the connection, and with it what is open on it, without waiting for anybody.
func (l *lease) discard() {
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	_ = l.conn.Close(ended)
	l.pooled.Release()
}

// failure wraps an error of the database: as ErrUnavailable where it could not be reached or can't serve now, plainly where it
// refused, since trying again would not help.
func failure(verb, key string, err error) error {
	var refusal *pgconn.PgError
	unavailable := !errors.As(err, &refusal)
	for _, class := range []string{
		"08", "53", "57", // connections, resources, an operator's doing
		"40", "55P03", // conflicts with other transactions
		"25006", "0A000", // read-only: a standby, which has no unlogged tables either
	} {
		unavailable = unavailable || strings.HasPrefix(refusal.Code, class)
	}
	if unavailable {
		return fmt.Errorf("%w: %s %s: %w", redislock.ErrUnavailable, verb, key, err)
	}
	return fmt.Errorf("redislock: %s %s: %w", verb, key, explain(err))
}

package pgfence

import (
	"context"
	"errors"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"example.com/redislock/internal/store"
)

type txContextKey struct{}

// watchedTx is the transaction as the handler sees it. The connection is the handler's while a call or rows of it are open,
// and the watchdog's for a moment now and then.
type watchedTx struct {
	pgx.Tx
	lease  *lease
	within bool // on a savepoint
}

var errNotYours = errors.New("redislock: the transaction of a row lock ends with its handler: return nil to commit, an error to roll back")

// enter takes the connection for a call. A lock that has ended has no transaction any more.
func (t *watchedTx) enter(ctx context.Context) error {
	if err := t.lease.owner.Ended(); err != nil {
		return err
	}
	return t.lease.turns.enter(ctx)
}

// leave ends what enter began. A connection that broke meanwhile is the end of the lock.
func (t *watchedTx) leave() {
	broken := t.lease.conn.Conn().IsClosed()
	t.lease.turns.leave()
	if broken {
		t.lease.owner.Lose(store.Gone("its connection to PostgreSQL is lost"))
	}
}

// Begin starts a transaction within this one.
func (t *watchedTx) Begin(ctx context.Context) (pgx.Tx, error) {
	if err := t.enter(ctx); err != nil {
		return nil, err
	}
	defer t.leave()
	tx, err := t.Tx.Begin(ctx)
	if err != nil {
		return nil, err
	}
	return &watchedTx{Tx: tx, lease: t.lease, within: true}, nil
}

// Commit is for transactions within.
func (t *watchedTx) Commit(ctx context.Context) error { return t.end(ctx, t.Tx.Commit) }

// Rollback is for transactions within.
func (t *watchedTx) Rollback(ctx context.Context) error { return t.end(ctx, t.Tx.Rollback) }

func (t *watchedTx) end(ctx context.Context, end func(context.Context) error) error {
	if !t.within {
		return errNotYours
	}
	if err := t.enter(ctx); err != nil {
		return err
	}
	defer t.leave()
	return end(ctx)
}

func (t *watchedTx) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, from pgx.CopyFromSource) (int64, error) {
	if err := t.enter(ctx); err != nil {
		return 0, err
	}
	defer t.leave()
	return t.Tx.CopyFrom(ctx, table, columns, from)
}

func (t *watchedTx) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	if err := t.enter(ctx); err != nil {
		return nil, err
	}
	defer t.leave()
	return t.Tx.Prepare(ctx, name, sql)
}

func (t *watchedTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if err := t.enter(ctx); err != nil {
		return pgconn.CommandTag{}, err
	}
	defer t.leave()
	return t.Tx.Exec(ctx, sql, args...)
}

func (t *watchedTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if err := t.enter(ctx); err != nil {
		return failed{err}, err
	}
	rows, err := t.Tx.Query(ctx, sql, args...)
	if err != nil {
		t.leave()
		return rows, err
	}
	return &watchedRows{rows, sync.OnceFunc(t.leave)}, nil
}

func (t *watchedTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if err := t.enter(ctx); err != nil {
		return failed{err}
	}
	return &watchedRow{t.Tx.QueryRow(ctx, sql, args...), sync.OnceFunc(t.leave)}
}

func (t *watchedTx) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	if err := t.enter(ctx); err != nil {
		return pgx.FailedBatchResults(batch, err)
	}
	return &watchedBatch{t.Tx.SendBatch(ctx, batch), sync.OnceFunc(t.leave)}
}

// LargeObjects lead past the watch.
func (t *watchedTx) LargeObjects() pgx.LargeObjects {
	t.lease.turns.unwatch()
	return t.Tx.LargeObjects()
}

// Conn leads past the watch.
func (t *watchedTx) Conn() *pgx.Conn {
	t.lease.turns.unwatch()
	return t.Tx.Conn()
}

// watchedRows have the connection until they are closed, at their end or by an error.
type watchedRows struct {
	pgx.Rows
	leave func()
}

func (r *watchedRows) Close() {
	r.Rows.Close()
	r.leave()
}

func (r *watchedRows) Next() bool {
	more := r.Rows.Next()
	if !more {
		r.leave()
	}
	return more
}

func (r *watchedRows) Scan(dest ...any) error {
	err := r.Rows.Scan(dest...)
	if err != nil {
		r.leave()
	}
	return err
}

func (r *watchedRows) Values() ([]any, error) {
	values, err := r.Rows.Values()
	if err != nil {
		r.leave()
	}
	return values, err
}

type watchedRow struct {
	pgx.Row
	leave func()
}

func (r *watchedRow) Scan(dest ...any) error {
	defer r.leave()
	return r.Row.Scan(dest...)
}

type watchedBatch struct {
	pgx.BatchResults
	leave func()
}

func (b *watchedBatch) Close() error {
	defer b.leave()
	return b.BatchResults.Close()
}

// failed is the outcome of a query that could not start.
type failed struct{ err error }

func (f failed) Scan(...any) error                            { return f.err }
func (f failed) Err() error                                   { return f.err }
func (f failed) Values() ([]any, error)                       { return nil, f.err }
func (f failed) Close()                                       {}
func (f failed) Next() bool                                   { return false }
func (f failed) CommandTag() pgconn.CommandTag                { return pgconn.CommandTag{} }
func (f failed) FieldDescriptions() []pgconn.FieldDescription { return nil }
func (f failed) RawValues() [][]byte                          { return nil }
func (f failed) Conn() *pgx.Conn                              { return nil }
func (f failed) TypeMap() *pgtype.Map                         { return nil }

// turns keeps the watchdog off the connection while the handler is on it, and the other way round.
type turns struct {
	mu        sync.Mutex
	calls     int           // of the handler, and rows, that are open
	watching  chan struct{} // closed when the watchdog is off it
	unwatched bool
	closed    bool
}

// enter waits for the watchdog, at most until ctx ends.
func (t *turns) enter(ctx context.Context) error {
	for {
		t.mu.Lock()
		watching := t.watching
		switch {
		case t.closed:
			t.mu.Unlock()
			return pgx.ErrTxClosed
		case watching == nil:
			t.calls++
			t.mu.Unlock()
			return nil
		}
		t.mu.Unlock()
		select {
		case <-watching:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (t *turns) leave() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.calls--
}

func (t *turns) unwatch() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.unwatched = true
}

// tryWatch reports whether the connection is the watchdog's until watched is called.
func (t *turns) tryWatch() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.calls > 0 || t.watching != nil || t.unwatched || t.closed {
		return false
	}
	t.watching = make(chan struct{})
	return true
}

func (t *turns) watched() {
	t.mu.Lock()
	defer t.mu.Unlock()
	close(t.watching)
	t.watching = nil
}

// close lets nobody in any more. It waits for the watchdog, and reports whether the handler is off the connection.
func (t *turns) close() (idle bool) {
	t.mu.Lock()
	t.closed = true
	watching := t.watching
	t.mu.Unlock()
	if watching != nil {
		<-watching
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.calls == 0
}

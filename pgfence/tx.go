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

// leave ends a call. A connection that broke meanwhile is the end of the lock; pgx breaks it where the call's context ends.
func (l *lease) leave(ctx context.Context) {
	broken := l.conn.IsClosed()
	if last := l.turns.leave(); last != nil {
		last()
		return // the lock has ended
	}
	switch why := ctx.Err(); {
	case broken && why != nil:
		l.owner.Lose(store.Gone("its connection to PostgreSQL was closed with the context of a call: " + why.Error()))
	case broken:
		l.owner.Lose(store.Gone("its connection to PostgreSQL is lost"))
	}
}

// Begin starts a transaction within this one.
func (t *watchedTx) Begin(ctx context.Context) (pgx.Tx, error) {
	if err := t.enter(ctx); err != nil {
		return nil, err
	}
	defer t.lease.leave(ctx)
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
	defer t.lease.leave(ctx)
	return end(ctx)
}

func (t *watchedTx) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, from pgx.CopyFromSource) (int64, error) {
	if err := t.enter(ctx); err != nil {
		return 0, err
	}
	defer t.lease.leave(ctx)
	return t.Tx.CopyFrom(ctx, table, columns, from)
}

func (t *watchedTx) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	if err := t.enter(ctx); err != nil {
		return nil, err
	}
	defer t.lease.leave(ctx)
	return t.Tx.Prepare(ctx, name, sql)
}

func (t *watchedTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if err := t.enter(ctx); err != nil {
		return pgconn.CommandTag{}, err
	}
	defer t.lease.leave(ctx)
	return t.Tx.Exec(ctx, sql, args...)
}

func (t *watchedTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if err := t.enter(ctx); err != nil {
		return failed{err: err}, err
	}
	defer t.lease.leave(ctx)
	rows, err := t.Tx.Query(ctx, sql, args...)
	if err != nil {
		return rows, err
	}
	return &watchedRows{rows, t.open(ctx)}, nil
}

func (t *watchedTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if err := t.enter(ctx); err != nil {
		return failed{err: err}
	}
	defer t.lease.leave(ctx)
	return &watchedRow{t.Tx.QueryRow(ctx, sql, args...), t.open(ctx)}
}

func (t *watchedTx) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	if err := t.enter(ctx); err != nil {
		return pgx.FailedBatchResults(batch, err)
	}
	defer t.lease.leave(ctx)
	return &watchedBatch{t.Tx.SendBatch(ctx, batch), t.open(ctx)}
}

// LargeObjects lead past the watch.
func (t *watchedTx) LargeObjects() pgx.LargeObjects {
	if t.lease.turns.unwatch() {
		return t.Tx.LargeObjects()
	}
	b := &pgx.Batch{}
	b.BeginTx(pgx.TxOptions{})
	return pgx.FailedBatchResults(b, pgx.ErrTxClosed).Tx().LargeObjects() // of a closed transaction
}

// Conn leads past the watch.
func (t *watchedTx) Conn() *pgx.Conn {
	if t.lease.turns.unwatch() {
		return t.Tx.Conn()
	}
	return nil
}

// result is something that is read from the connection, which nobody else can use until it is closed.
type result struct {
	lease  *lease
	ctx    context.Context // of the call that it came from
	closed bool
}

// open notes a new result.
func (t *watchedTx) open(ctx context.Context) *result {
	t.lease.turns.opened()
	return &result{lease: t.lease, ctx: ctx}
}

// read runs a call that reads from the connection, unless the lock has ended. It is over with the result when the call says so.
func (r *result) read(call func() (over bool)) bool {
	if !r.lease.turns.reenter() {
		return false
	}
	defer r.lease.leave(r.ctx)
	if call() && !r.closed {
		r.closed = true
		r.lease.turns.shut()
	}
	return true
}

// watchedRows are closed at their end, and by an error.
type watchedRows struct {
	pgx.Rows
	result *result
}

func (r *watchedRows) Close() {
	r.result.read(func() bool { r.Rows.Close(); return true })
}

func (r *watchedRows) Next() (more bool) {
	r.result.read(func() bool { more = r.Rows.Next(); return !more })
	return more
}

func (r *watchedRows) Scan(dest ...any) error {
	err := pgx.ErrTxClosed
	r.result.read(func() bool { err = r.Rows.Scan(dest...); return err != nil })
	return err
}

func (r *watchedRows) Values() (values []any, err error) {
	err = pgx.ErrTxClosed
	r.result.read(func() bool { values, err = r.Rows.Values(); return err != nil })
	return values, err
}

// Conn leads past the watch.
func (r *watchedRows) Conn() *pgx.Conn {
	if r.result.lease.turns.unwatch() {
		return r.Rows.Conn()
	}
	return nil
}

// Err also tells of rows that the end of the lock has cut off.
func (r *watchedRows) Err() error {
	if err := r.Rows.Err(); err != nil || r.result.closed {
		return err
	}
	return r.result.lease.owner.Ended()
}

type watchedRow struct {
	pgx.Row
	result *result
}

func (r *watchedRow) Scan(dest ...any) error {
	err := pgx.ErrTxClosed
	r.result.read(func() bool { err = r.Row.Scan(dest...); return true })
	return err
}

type watchedBatch struct {
	pgx.BatchResults
	result *result
}

func (b *watchedBatch) Exec() (tag pgconn.CommandTag, err error) {
	err = pgx.ErrTxClosed
	b.result.read(func() bool { tag, err = b.BatchResults.Exec(); return false })
	return tag, err
}

func (b *watchedBatch) Query() (rows pgx.Rows, err error) {
	rows, err = failed{err: pgx.ErrTxClosed}, pgx.ErrTxClosed
	b.result.read(func() bool {
		if rows, err = b.BatchResults.Query(); err == nil {
			rows = &watchedRows{rows, &result{lease: b.result.lease, ctx: b.result.ctx, closed: true}} // the batch is what is open
		}
		return false
	})
	return rows, err
}

func (b *watchedBatch) QueryRow() pgx.Row {
	var row pgx.Row = failed{err: pgx.ErrTxClosed}
	b.result.read(func() bool {
		row = &watchedRow{b.BatchResults.QueryRow(), &result{lease: b.result.lease, ctx: b.result.ctx, closed: true}}
		return false
	})
	return row
}

func (b *watchedBatch) Close() error {
	err := pgx.ErrTxClosed
	b.result.read(func() bool { err = b.BatchResults.Close(); return true })
	return err
}

// failed is the outcome of a query that could not start.
type failed struct {
	pgx.Rows // none
	err      error
}

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
	calls     int           // of the handler, that are under way
	results   int           // that are open
	watching  chan struct{} // closed when the watchdog is off it
	unwatched bool
	closed    bool
	last      func() // for the last call to leave a closed connection
}

// enter begins a call. It waits for the watchdog, at most until ctx ends.
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

// reenter is enter for the calls of a result, which has kept the watchdog off.
func (t *turns) reenter() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.closed {
		t.calls++
	}
	return !t.closed
}

// leave ends a call. It returns what the last one has to do.
func (t *turns) leave() (last func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.calls--; t.calls == 0 {
		last, t.last = t.last, nil
	}
	return last
}

func (t *turns) opened() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.results++
}

func (t *turns) shut() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.results--
}

// unwatch keeps the watchdog off for good. It reports whether the connection is still the handler's.
func (t *turns) unwatch() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.closed {
		t.unwatched = true
	}
	return !t.closed
}

// tryWatch reports whether the connection is the watchdog's until watched is called.
func (t *turns) tryWatch() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.calls > 0 || t.results > 0 || t.watching != nil || t.unwatched || t.closed {
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

// underWatch returns what is closed when the watchdog is off the connection, nil if it isn't on it.
func (t *turns) underWatch() <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.watching
}

// close lets nobody in any more. It returns what underWatch does.
func (t *turns) close() <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
	return t.watching
}

// abandon reports whether the handler is off a closed connection and all results are closed. Otherwise it has discard called when
// no call is under way.
func (t *turns) abandon(discard func()) (idle bool) {
	t.mu.Lock()
	calls, idle := t.calls, t.calls == 0 && t.results == 0
	if calls > 0 {
		t.last = discard
	}
	t.mu.Unlock()
	if calls == 0 && !idle {
		discard()
	}
	return idle
}

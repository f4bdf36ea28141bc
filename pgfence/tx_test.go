package pgfence

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"example.com/redislock"
)

// ledger is a database with a table to write to, and a Locker on it.
type ledger struct {
	url    string
	pool   *pgxpool.Pool
	locker *redislock.Locker
	other  *redislock.Locker // somebody else, with time enough for a try
	books  books
}

func newLedger(t *testing.T, opts ...redislock.Option) *ledger {
	t.Helper()
	return ledgerAt(t, database(t), opts...)
}

func ledgerAt(t *testing.T, url string, opts ...redislock.Option) *ledger {
	t.Helper()
	l := &ledger{url: url, pool: connect(t, url)}
	l.exec(t, "CREATE TABLE ledger (n int)")
	l.locker = locker(t, l.pool, &l.books, opts...)
	l.other = locker(t, l.pool, &books{})
	return l
}

// do is Locker.Do, again where a short TTL left no time for the try on a slow machine.
func do(ctx context.Context, l *redislock.Locker, name string, fn func(context.Context) error) error {
	for {
		ran := false
		err := l.Do(ctx, name, func(ctx context.Context) error {
			ran = true
			return fn(ctx)
		})
		if ran || !errors.Is(err, redislock.ErrUnavailable) {
			return err
		}
	}
}

func (l *ledger) exec(t *testing.T, sql string, args ...any) {
	t.Helper()
	if _, err := l.pool.Exec(t.Context(), sql, args...); err != nil {
		t.Fatal(err)
	}
}

// wantWritten fails the test unless just these numbers are committed.
func (l *ledger) wantWritten(t *testing.T, want ...int) {
	t.Helper()
	rows, _ := l.pool.Query(t.Context(), "SELECT n FROM ledger ORDER BY n")
	got, err := pgx.CollectRows(rows, pgx.RowTo[int])
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("committed %v (%v), want %v", got, err, want)
	}
}

// wantFree fails the test unless the lock can be had at once, and no marker is there.
func (l *ledger) wantFree(t *testing.T, name string) {
	t.Helper()
	k, err := l.other.TryAcquire(t.Context(), name)
	if err != nil {
		t.Errorf("lock %s is not free: %v", name, err)
		return
	}
	if err := k.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

const insert = "INSERT INTO ledger VALUES ($1)"

// write writes a number in the handler's transaction, whether its context has ended or not.
func write(ctx context.Context, n int) error {
	tx, ok := Tx(ctx)
	if !ok {
		return errors.New("no transaction in the context")
	}
	_, err := tx.Exec(context.WithoutCancel(ctx), insert, n)
	return err
}

func TestAHandlersWritesAndItsMarkerCommitTogether(t *testing.T) {
	l := newLedger(t, redislock.WithDoneFor(time.Hour))
	err := l.locker.Do(t.Context(), "job", func(ctx context.Context) error {
		if err := write(ctx, 1); err != nil {
			return err
		}
		l.wantWritten(t)
		if h, ok, err := l.locker.Holder(ctx, "job"); h.Done || !ok || err != nil {
			t.Errorf("while it runs: holder %v, %v, %v", h, ok, err)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	l.wantWritten(t, 1)
	if h, ok, err := l.locker.Holder(t.Context(), "job"); !h.Done || !ok || err != nil {
		t.Errorf("afterwards: holder %v, %v, %v; want a marker", h, ok, err)
	}
	var together bool
	if err := l.pool.QueryRow(t.Context(), "SELECT (SELECT xmin FROM ledger) = (SELECT xmin FROM redislock_locks)").Scan(&together); err != nil || !together {
		t.Errorf("one transaction has written both: %v, %v", together, err)
	}
	l.books.want(t, "acquired=1 released=1")
}

func TestWithoutWithDoneForASuccessIsCommittedAndTheLockIsFree(t *testing.T) {
	l := newLedger(t)
	if err := l.locker.Do(t.Context(), "job", func(ctx context.Context) error { return write(ctx, 1) }); err != nil {
		t.Fatal(err)
	}
	l.wantWritten(t, 1)
	l.wantFree(t, "job")
}

var errPrinter = errors.New("the printer is out of paper")

func TestWhateverElseAHandlerEndsWithIsRolledBackAndTheLockIsFree(t *testing.T) {
	l := newLedger(t, redislock.WithDoneFor(time.Hour))
	for name, c := range map[string]struct {
		end  func(context.Context) error
		want any // what comes out: an error, a panic's value, or nil for a return of nil
	}{
		"error":               {func(context.Context) error { return errPrinter }, errPrinter},
		"panic":               {func(context.Context) error { panic("paper jam") }, "paper jam"},
		"panic with an error": {func(context.Context) error { panic(errPrinter) }, errPrinter},
		"Goexit":              {func(context.Context) error { runtime.Goexit(); return nil }, "gone"},
		"Release by hand": {func(ctx context.Context) error {
			k, _ := redislock.FromContext(ctx)
			if err := k.Release(ctx); err != nil {
				t.Error(err)
			}
			return nil
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			var got any
			var wg sync.WaitGroup
			wg.Go(func() {
				got = "gone"
				defer func() {
					if p := recover(); p != nil {
						got = p
					}
				}()
				err := l.locker.Do(t.Context(), name, func(ctx context.Context) error {
					if err := write(ctx, 1); err != nil {
						t.Error(err)
					}
					return c.end(ctx)
				})
				got = any(err)
			})
			wg.Wait()
			if got != c.want {
				t.Errorf("got %v, want %v", got, c.want)
			}
			l.wantFree(t, name)
			l.wantWritten(t)
		})
	}
}

func TestACommitThatFailsIsTheTasksErrorAndNothingIsCommitted(t *testing.T) {
	l := newLedger(t, redislock.WithDoneFor(time.Hour))
	l.exec(t, "CREATE TABLE parent (id int PRIMARY KEY); CREATE TABLE child (id int REFERENCES parent DEFERRABLE INITIALLY DEFERRED)")
	for name, c := range map[string]struct {
		do   func(ctx context.Context, tx pgx.Tx)
		says string
	}{
		"deferred constraint": {func(ctx context.Context, tx pgx.Tx) { _, _ = tx.Exec(ctx, "INSERT INTO child VALUES (7)") }, "child_id_fkey"},
		"aborted":             {func(ctx context.Context, tx pgx.Tx) { _, _ = tx.Exec(ctx, "SELECT 1/0") }, "aborted"},
		"rows left open":      {func(ctx context.Context, tx pgx.Tx) { _, _ = tx.Query(ctx, "SELECT 1") }, "still open"},
		"row not scanned":     {func(ctx context.Context, tx pgx.Tx) { _ = tx.QueryRow(ctx, "SELECT 1") }, "still open"},
		"batch left open": {func(ctx context.Context, tx pgx.Tx) {
			batch := &pgx.Batch{}
			batch.Queue("SELECT 1")
			_ = tx.SendBatch(ctx, batch)
		}, "still open"},
		"rolled back in SQL": {func(ctx context.Context, tx pgx.Tx) { _, _ = tx.Exec(ctx, "ROLLBACK") }, "commit"},
	} {
		t.Run(name, func(t *testing.T) {
			err := l.locker.Do(t.Context(), name, func(ctx context.Context) error {
				if err := write(ctx, 1); err != nil {
					t.Error(err)
				}
				tx, _ := Tx(ctx)
				c.do(ctx, tx)
				return nil
			})
			if err == nil || !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), "commit under lock redislock:{"+name+"}") {
				t.Errorf("the task's result is %v; want an error that speaks of the commit and %q", err, c.says)
			}
			if errors.Is(err, redislock.ErrLost) || errors.Is(err, redislock.ErrUnavailable) {
				t.Errorf("%v: the lock was held and the database there", err)
			}
			l.wantFree(t, name)
			l.wantWritten(t)
		})
	}
}

func TestTheTransactionIsNotTheHandlersToEnd(t *testing.T) {
	l := newLedger(t)
	err := l.locker.Do(t.Context(), "job", func(ctx context.Context) error {
		tx, _ := Tx(ctx)
		if err := write(ctx, 1); err != nil {
			return err
		}
		for name, end := range map[string]func(context.Context) error{"Commit": tx.Commit, "Rollback": tx.Rollback} {
			if err := end(ctx); err == nil || !strings.Contains(err.Error(), "ends with its handler") {
				t.Errorf("%s: %v", name, err)
			}
		}
		l.wantWritten(t)
		return write(ctx, 2)
	})
	if err != nil {
		t.Fatal(err)
	}
	l.wantWritten(t, 1, 2)
}

func TestATransactionWithinIsTheHandlersToEnd(t *testing.T) {
	l := newLedger(t)
	err := l.locker.Do(t.Context(), "job", func(ctx context.Context) error {
		tx, _ := Tx(ctx)
		put := func(n int, end error) func(pgx.Tx) error {
			return func(tx pgx.Tx) error {
				_, err := tx.Exec(ctx, insert, n)
				return errors.Join(err, end)
			}
		}
		if err := pgx.BeginFunc(ctx, tx, put(1, nil)); err != nil {
			t.Errorf("commit within: %v", err)
		}
		if err := pgx.BeginFunc(ctx, tx, put(2, errPrinter)); !errors.Is(err, errPrinter) {
			t.Errorf("rollback within: %v", err)
		}
		if err := pgx.BeginFunc(ctx, tx, func(outer pgx.Tx) error {
			if err := pgx.BeginFunc(ctx, outer, put(3, errPrinter)); !errors.Is(err, errPrinter) {
				t.Errorf("rollback further within: %v", err)
			}
			return put(4, nil)(outer)
		}); err != nil {
			t.Errorf("commit around a rollback: %v", err)
		}
		if err := pgx.BeginFunc(ctx, tx, func(within pgx.Tx) error {
			_, err := within.Exec(ctx, "SELECT 1/0")
			return err
		}); err == nil {
			t.Error("a failure within was swallowed")
		}
		within, err := tx.Begin(ctx)
		if err != nil {
			return err
		}
		if err := within.Commit(ctx); err != nil {
			t.Error(err)
		}
		if err := within.Rollback(ctx); !errors.Is(err, pgx.ErrTxClosed) {
			t.Errorf("ended twice: %v, want pgx.ErrTxClosed", err)
		}
		return write(ctx, 5)
	})
	if err != nil {
		t.Fatal(err)
	}
	l.wantWritten(t, 1, 4, 5)
}

// calls are all that can be asked of a transaction.
var calls = map[string]func(context.Context, pgx.Tx) error{
	"Exec": func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, insert, 1)
		return err
	},
	"Query": func(ctx context.Context, tx pgx.Tx) error {
		rows, err := tx.Query(ctx, "INSERT INTO ledger VALUES (1) RETURNING n")
		for err == nil && rows.Next() {
			_, err = rows.Values()
		}
		rows.Close()
		return errors.Join(err, rows.Err())
	},
	"CollectRows": func(ctx context.Context, tx pgx.Tx) error {
		rows, _ := tx.Query(ctx, "INSERT INTO ledger VALUES (1) RETURNING n")
		_, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[int])
		return err
	},
	"Query closed early": func(ctx context.Context, tx pgx.Tx) error {
		rows, err := tx.Query(ctx, "INSERT INTO ledger SELECT 1 FROM generate_series(1, 1) RETURNING n")
		if err != nil {
			return err
		}
		rows.Next()
		rows.Close()
		rows.Close()
		return rows.Err()
	},
	"Scan that fails": func(ctx context.Context, tx pgx.Tx) error {
		rows, err := tx.Query(ctx, "INSERT INTO ledger VALUES (1) RETURNING n")
		if err != nil {
			return err
		}
		var wrong time.Time
		rows.Next()
		if rows.Scan(&wrong) == nil {
			return errors.New("a number is no time")
		}
		return nil
	},
	"QueryRow": func(ctx context.Context, tx pgx.Tx) error {
		return tx.QueryRow(ctx, "INSERT INTO ledger VALUES (1) RETURNING n").Scan(new(int))
	},
	"SendBatch": func(ctx context.Context, tx pgx.Tx) error {
		batch := &pgx.Batch{}
		batch.Queue("SELECT 1").QueryRow(func(row pgx.Row) error { return row.Scan(new(int)) })
		batch.Queue(insert, 1)
		return tx.SendBatch(ctx, batch).Close()
	},
	"CopyFrom": func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.CopyFrom(ctx, pgx.Identifier{"ledger"}, []string{"n"}, pgx.CopyFromRows([][]any{{1}}))
		return err
	},
	"Prepare": func(ctx context.Context, tx pgx.Tx) error {
		if _, err := tx.Prepare(ctx, "put", insert); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, "put", 1)
		return err
	},
	"Begin": func(ctx context.Context, tx pgx.Tx) error {
		return pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, insert, 1)
			return err
		})
	},
	"LargeObjects": func(ctx context.Context, tx pgx.Tx) error {
		large := tx.LargeObjects()
		_, err := large.Create(ctx, 0)
		return err
	},
	"Conn": func(ctx context.Context, tx pgx.Tx) error {
		conn := tx.Conn()
		if conn == nil {
			return pgx.ErrTxClosed
		}
		_, err := conn.Exec(ctx, insert, 1)
		return err
	},
}

func TestWhatATransactionCanDoWorks(t *testing.T) {
	l := newLedger(t)
	for name, call := range calls {
		t.Run(name, func(t *testing.T) {
			l.exec(t, "TRUNCATE ledger")
			err := l.locker.Do(t.Context(), "job", func(ctx context.Context) error {
				tx, _ := Tx(ctx)
				err := call(ctx, tx)
				if name == "LargeObjects" { // which write elsewhere
					err = errors.Join(err, write(ctx, 1))
				}
				l.wantWritten(t)
				return err
			})
			if err != nil {
				t.Error(err)
			}
			l.wantWritten(t, 1)
		})
	}
}

func TestAFailedStatementIsTheHandlersToSee(t *testing.T) {
	l := newLedger(t)
	_ = l.locker.Do(t.Context(), "job", func(ctx context.Context) error {
		tx, _ := Tx(ctx)
		if _, err := tx.Exec(ctx, "SELECT nonsense"); err == nil {
			t.Error("Exec: no error")
		}
		for name, call := range calls { // in an aborted transaction
			if err := call(ctx, tx); err == nil {
				t.Errorf("%s: no error", name)
			}
		}
		return errPrinter
	})
	l.wantFree(t, "job")
}

// outliving are the ways in which a handler's transaction ends while somebody still has it.
var outliving = map[string]func(t *testing.T, l *ledger, ctx context.Context) error{
	"commit":   func(*testing.T, *ledger, context.Context) error { return nil },
	"rollback": func(*testing.T, *ledger, context.Context) error { return errPrinter },
	"Release by hand": func(t *testing.T, _ *ledger, ctx context.Context) error {
		k, _ := redislock.FromContext(ctx)
		if err := k.Release(context.WithoutCancel(ctx)); err != nil {
			t.Error(err)
		}
		return nil
	},
	"ForceRelease": func(t *testing.T, l *ledger, ctx context.Context) error {
		if err := l.locker.ForceRelease(ctx, "job"); err != nil {
			t.Error(err)
		}
		wantEnd(t, ctx)
		return errPrinter
	},
}

// wantEnd waits for the end of a context.
func wantEnd(t *testing.T, ctx context.Context) {
	t.Helper()
	select {
	case <-ctx.Done():
	case <-time.After(20 * time.Second):
		t.Error("the context never ended")
	}
}

func TestAfterTheLockHasEndedItsTransactionIsClosed(t *testing.T) {
	for ending, end := range outliving {
		t.Run(ending, func(t *testing.T) {
			t.Parallel()
			l := newLedger(t, redislock.WithTTL(time.Second))
			one := connect(t, l.url, func(c *pgxpool.Config) { c.MaxConns = 1 })
			l.locker = locker(t, one, &l.books, redislock.WithTTL(time.Second)) // the next to use the pool gets the same connection
			for name, call := range calls {
				var before, within pgx.Tx
				err := do(t.Context(), l.locker, "job", func(ctx context.Context) (err error) {
					before, _ = Tx(ctx)
					if within, err = before.Begin(ctx); err != nil {
						return err
					}
					if ending == "ForceRelease" { // by another pool: this one has no connection to spare
						return end(t, &ledger{locker: locker(t, l.pool, &l.books)}, ctx)
					}
					return end(t, l, ctx)
				})
				if err != nil && !errors.Is(err, errPrinter) {
					t.Fatal(err)
				}
				for which, tx := range map[string]pgx.Tx{"": before, " on a savepoint": within} {
					wantClosed(t, name+which, func() error { return call(t.Context(), tx) })
				}
			}
			for name, end := range map[string]func(pgx.Tx, context.Context) error{"Commit": pgx.Tx.Commit, "Rollback": pgx.Tx.Rollback} {
				var within pgx.Tx
				_ = do(t.Context(), l.locker, "job", func(ctx context.Context) error {
					tx, _ := Tx(ctx)
					within, _ = tx.Begin(ctx)
					return nil
				})
				wantClosed(t, name, func() error { return end(within, t.Context()) })
			}
			l.wantWritten(t)
		})
	}
}

func wantClosed(t *testing.T, what string, call func() error) {
	t.Helper()
	defer func() {
		if p := recover(); p != nil {
			t.Errorf("%s after the end panics: %v", what, p)
		}
	}()
	err := call()
	pastTheWatch := strings.HasPrefix(what, "Conn") || strings.HasPrefix(what, "LargeObjects") // a closed connection will do
	if err == nil || !pastTheWatch && !errors.Is(err, redislock.ErrLost) && !errors.Is(err, pgx.ErrTxClosed) {
		t.Errorf("%s after the end: %v, want ErrLost or pgx.ErrTxClosed", what, err)
	}
}

// What leads past the watch must not lead to the next user of the connection.
func TestWhatLeadsPastTheWatchLeadsNowhereOnceTheLockHasEnded(t *testing.T) {
	for name, lead := range map[string]func(tx pgx.Tx) func(context.Context) error{
		"Conn": func(tx pgx.Tx) func(context.Context) error {
			conn := tx.Conn()
			return func(ctx context.Context) error {
				_, err := conn.Exec(ctx, insert, 1)
				return err
			}
		},
		"LargeObjects": func(tx pgx.Tx) func(context.Context) error {
			large := tx.LargeObjects()
			return func(ctx context.Context) error {
				_, err := large.Create(ctx, 0)
				return err
			}
		},
	} {
		for ending, result := range map[string]error{"commit": nil, "rollback": errPrinter} {
			t.Run(name+", "+ending, func(t *testing.T) {
				l := newLedger(t)
				var use func(context.Context) error
				if err := do(t.Context(), l.locker, "job", func(ctx context.Context) error {
					tx, _ := Tx(ctx)
					use = lead(tx)
					return result
				}); !errors.Is(err, result) {
					t.Fatal(err)
				}
				if use(t.Context()) == nil {
					t.Error("it still works, on a connection that the pool may have handed on")
				}
			})
		}
	}
}

func TestRowsMayBeClosedAfterTheLockHasEnded(t *testing.T) {
	for ending, end := range outliving {
		t.Run(ending, func(t *testing.T) {
			t.Parallel()
			l := newLedger(t, redislock.WithTTL(time.Second))
			batch := &pgx.Batch{}
			batch.Queue("SELECT 1")
			for what, open := range map[string]func(context.Context, pgx.Tx) func(){
				"rows": func(ctx context.Context, tx pgx.Tx) func() {
					rows, err := tx.Query(ctx, "SELECT generate_series(1, 100000)")
					if err != nil {
						t.Error(err)
					}
					return rows.Close
				},
				"rows read on": func(ctx context.Context, tx pgx.Tx) func() {
					rows, err := tx.Query(ctx, "SELECT generate_series(1, 100000)")
					if err != nil {
						t.Error(err)
					}
					return func() {
						for rows.Next() {
							_, _ = rows.Values()
						}
					}
				},
				"row": func(ctx context.Context, tx pgx.Tx) func() {
					row := tx.QueryRow(ctx, "SELECT 1")
					return func() { _ = row.Scan(new(int)) }
				},
				"batch": func(ctx context.Context, tx pgx.Tx) func() {
					results := tx.SendBatch(ctx, batch)
					return func() { _ = results.Close() }
				},
			} {
				func() {
					defer func() {
						if p := recover(); p != nil {
							t.Errorf("%s closed after the end: panic: %v", what, p)
						}
					}()
					var finish func()
					if err := do(t.Context(), l.locker, "job", func(ctx context.Context) error {
						tx, _ := Tx(ctx)
						finish = open(context.WithoutCancel(ctx), tx)
						if ending == "ForceRelease" { // an open query is not watched: no sign of the loss before it is read on
							return l.locker.ForceRelease(ctx, "job")
						}
						return end(t, l, ctx)
					}); err == nil && ending == "commit" {
						t.Errorf("%s left open: committed", what)
					}
					finish()
				}()
				eventually(t, "lock free", func(ctx context.Context) bool {
					k, err := l.other.TryAcquire(ctx, "job")
					return err == nil && k.Release(ctx) == nil
				})
			}
		})
	}
}

// A goroutine that a handler has left behind is in a call when the transaction ends.
func TestACallMayOutliveItsHandler(t *testing.T) {
	l := newLedger(t)
	for range 3 {
		inCall := make(chan error, 1)
		err := do(t.Context(), l.locker, "job", func(ctx context.Context) error {
			tx, _ := Tx(ctx)
			go func() {
				defer func() {
					if p := recover(); p != nil {
						inCall <- fmt.Errorf("panic: %v", p)
					}
				}()
				_, err := tx.Exec(context.WithoutCancel(ctx), "SELECT pg_sleep(60)")
				if err == nil {
					err = errors.New("it slept to the end")
				}
				inCall <- err
			}()
			eventually(t, "call under way", func(ctx context.Context) bool {
				var n int
				_ = l.pool.QueryRow(ctx, "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query = 'SELECT pg_sleep(60)'").Scan(&n)
				return n == 1
			})
			return nil
		})
		if err == nil || !strings.Contains(err.Error(), "still open") {
			t.Errorf("the task's result is %v", err)
		}
		if err := <-inCall; strings.HasPrefix(err.Error(), "panic") || strings.HasPrefix(err.Error(), "it slept") {
			t.Errorf("the call: %v", err)
		}
		l.exec(t, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query = 'SELECT pg_sleep(60)'")
		eventually(t, "lock free", func(ctx context.Context) bool {
			k, err := l.other.TryAcquire(ctx, "job")
			return err == nil && k.Release(ctx) == nil
		})
	}
}

func TestACallWhoseContextEndsTakesTheLockAlongAndSaysSo(t *testing.T) {
	pool := connect(t, database(t))
	var b books
	l := locker(t, pool, &b)
	err := l.Do(t.Context(), "n", func(ctx context.Context) error {
		tx, _ := Tx(ctx)
		short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
		defer cancel()
		_, err := tx.Exec(short, "SELECT pg_sleep(60)")
		if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(context.Cause(ctx), redislock.ErrLost) {
			t.Errorf("the call ends with %v, the handler's context with %v", err, context.Cause(ctx))
		}
		return nil
	})
	if !errors.Is(err, redislock.ErrLost) || !strings.Contains(err.Error(), "with the context of a call") {
		t.Errorf("error is %v, want ErrLost that says why", err)
	}
}

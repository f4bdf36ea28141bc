package pgfence

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/hibiken/asynq"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"example.com/redislock"
	"example.com/redislock/internal/store"
)

// --- Construction ---

func TestABadOptionIsAnErrorThatNamesIt(t *testing.T) {
	pool, err := pgxpool.New(t.Context(), "postgres://127.0.0.1:1/none")
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	for name, c := range map[string]struct {
		pool *pgxpool.Pool
		opt  redislock.Option
		says []string
	}{
		"nil pool":     {nil, redislock.WithTTL(time.Second), []string{"pgfence: configure", "pool is nil"}},
		"fencing":      {pool, redislock.WithFencing(), []string{"WithFencing", "PostgreSQL"}},
		"fail open":    {pool, redislock.WithFailOpen(), []string{"WithFailOpen", "PostgreSQL"}},
		"nil option":   {pool, nil, []string{"option 1 is nil"}},
		"short TTL":    {pool, redislock.WithTTL(time.Millisecond), []string{"WithTTL", "1ms", "at least 1s"}},
		"negative":     {pool, redislock.WithDoneFor(-1), []string{"WithDoneFor", "-1ns"}},
		"brace":        {pool, redislock.WithKeyPrefix("a{"), []string{"WithKeyPrefix", "a{"}},
		"nil KeyFunc":  {pool, redislock.WithKey(nil), []string{"WithKey", "nil"}},
		"nil observer": {pool, redislock.WithObserver(nil), []string{"WithObserver", "nil"}},
	} {
		t.Run(name, func(t *testing.T) {
			l, err := New(c.pool, c.opt)
			if l != nil || err == nil {
				t.Fatalf("New returned %v, %v", l, err)
			}
			for _, want := range c.says {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q does not say %q", err, want)
				}
			}
			defer func() {
				if got := recover(); got != err.Error() {
					t.Errorf("Middleware panics with %v, New says %q", got, err)
				}
			}()
			Middleware(c.pool, c.opt)
		})
	}
}

// task runs a task of type "print" through a middleware, as it comes without a server.
func task(ctx context.Context, l *redislock.Locker, handler func(context.Context) error) error {
	return l.Middleware(asynq.HandlerFunc(func(ctx context.Context, _ *asynq.Task) error { return handler(ctx) })).
		ProcessTask(ctx, asynq.NewTask("print", nil))
}

func TestNestedLockersOfOnePoolAreOneLockIfTheirOptionsAreEqual(t *testing.T) {
	url := database(t)
	pool := connect(t, url)
	for name, c := range map[string]struct {
		inner  *pgxpool.Pool
		opt    redislock.Option
		passes bool
	}{
		"equal":            {pool, redislock.WithTTL(time.Minute), true},
		"another TTL":      {pool, redislock.WithTTL(time.Hour), false},
		"another done-for": {pool, redislock.WithDoneFor(time.Hour), false},
		"another grace":    {pool, redislock.WithGracePeriod(0), false},
		"another pool":     {connect(t, url), redislock.WithPolicy(redislock.Wait(time.Hour)), false}, // which would wait for itself
	} {
		t.Run(name, func(t *testing.T) {
			var b books
			outer, inner := locker(t, pool, &b, redislock.WithTTL(time.Minute)), locker(t, c.inner, &b, redislock.WithTTL(time.Minute), c.opt)
			var around, within pgx.Tx
			err := task(t.Context(), outer, func(ctx context.Context) error {
				around, _ = Tx(ctx)
				return task(ctx, inner, func(ctx context.Context) error {
					within, _ = Tx(ctx)
					return nil
				})
			})
			switch {
			case c.passes:
				if err != nil || within == nil || within != around {
					t.Errorf("%v, transactions %v and %v; want one for both", err, around, within)
				}
				b.want(t, "acquired=1 passed=1 ran=1 released=1")
			case err == nil || !strings.Contains(err.Error(), "call chain") || within != nil:
				t.Errorf("%v; want an error that speaks of the call chain", err)
			default:
				b.want(t, "acquired=1 ran=1 refused=1 released=1")
			}
		})
	}
}

func TestALockWithinALockHasATransactionOfItsOwn(t *testing.T) {
	l := newLedger(t)
	err := l.locker.Do(t.Context(), "outer", func(ctx context.Context) error {
		if err := l.locker.Do(ctx, "inner", func(ctx context.Context) error { return write(ctx, 1) }); err != nil {
			return err
		}
		l.wantWritten(t, 1)
		return write(ctx, 2)
	})
	if err != nil {
		t.Fatal(err)
	}
	l.wantWritten(t, 1, 2)
}

// --- Exclusion ---

func TestManyHoldersCountWithoutLoss(t *testing.T) {
	t.Parallel()
	const names, goroutines, runs = 3, 24, 8
	l := newLedger(t)
	l.exec(t, "CREATE TABLE counters (name text PRIMARY KEY, n int); INSERT INTO counters SELECT 'job' || i, 0 FROM generate_series(0, 2) i")
	var lockers []*redislock.Locker
	for i := range 4 {
		policy := redislock.Wait(5 * time.Second)
		if i%2 == 0 {
			policy = redislock.Retry(0)
		}
		key := redislock.WithKey(func(_ context.Context, task *asynq.Task) (string, error) { return string(task.Payload()), nil })
		lockers = append(lockers, locker(t, connect(t, l.url), &l.books, key, redislock.WithPolicy(policy)))
	}
	var inside [names]atomic.Int32
	var succeeded atomic.Int64
	var wg sync.WaitGroup
	for g := range goroutines {
		wg.Go(func() {
			for i := range runs {
				which := (g + i) % names
				name := fmt.Sprintf("job%d", which)
				handler := asynq.HandlerFunc(func(ctx context.Context, _ *asynq.Task) error {
					if inside[which].Add(1) != 1 {
						t.Errorf("%s: two at once", name)
					}
					defer inside[which].Add(-1)
					tx, _ := Tx(ctx)
					var n int
					if err := tx.QueryRow(ctx, "SELECT n FROM counters WHERE name = $1", name).Scan(&n); err != nil {
						return err
					}
					if _, err := tx.Exec(ctx, "SELECT pg_sleep(0.001)"); err != nil {
						return err
					}
					if _, err := tx.Exec(ctx, "UPDATE counters SET n = $2 WHERE name = $1", name, n+1); err != nil {
						return err
					}
					if i%4 == 3 {
						return errPrinter
					}
					return nil
				})
				err := redislock.ErrHeld
				for errors.Is(err, redislock.ErrHeld) || errors.Is(err, redislock.ErrUnavailable) {
					err = lockers[rand.N(len(lockers))].Middleware(handler).ProcessTask(t.Context(), asynq.NewTask("count", []byte(name)))
				}
				switch {
				case err == nil:
					succeeded.Add(1)
				case !errors.Is(err, errPrinter):
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	var sum int64
	if err := l.pool.QueryRow(t.Context(), "SELECT sum(n) FROM counters").Scan(&sum); err != nil || sum != succeeded.Load() || sum != goroutines*runs*3/4 {
		t.Errorf("counted %d (%v), want %d, of %d runs without an error", sum, err, succeeded.Load(), goroutines*runs*3/4)
	}
	if ran := len(l.books.of(redislock.EventRan)); ran != goroutines*runs {
		t.Errorf("%d ran, want %d: %s", ran, goroutines*runs, &l.books)
	}
}

// steps stops a claimer before each statement that it sends, and before the end of each batch, which is where a statement outside
// a transaction is committed.
type steps struct {
	hook atomic.Pointer[func()] // nil: go on
}

func (s *steps) slow(c *pgxpool.Config) {
	c.MaxConns = 1
	c.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return false }
	c.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, network, addr)
		return &steppingConn{conn, s}, err
	}
}

type steppingConn struct {
	net.Conn
	steps *steps
}

// Write gets whole messages: a letter, and a length that does not count it.
func (c *steppingConn) Write(p []byte) (int, error) {
	hook := c.steps.hook.Load()
	if hook == nil {
		return c.Conn.Write(p)
	}
	for rest := p; len(rest) > 0; {
		n := 1 + int(binary.BigEndian.Uint32(rest[1:5]))
		if strings.IndexByte("EQS", rest[0]) >= 0 { // Execute, Query, Sync
			(*hook)()
		}
		if _, err := c.Conn.Write(rest[:n]); err != nil {
			return 0, err
		}
		rest = rest[n:]
	}
	return len(p), nil
}

// claimer is one of two that want a key.
type claimer struct {
	steps
	name    string
	store   rowStore
	pid     uint32
	marker  bool // it leaves one
	resume  chan struct{}
	stopped chan struct{} // closed at the step to stop at
	done    chan struct{} // closed at the end
	taken   *store.Taken  // nil: it had the key, and has committed its work
	err     error
}

func newClaimer(t *testing.T, url, name string) *claimer {
	t.Helper()
	c := &claimer{name: name, marker: true}
	c.store = rowStore{connect(t, url, c.slow)}
	for range 2 { // prepares all statements, of the winner and the loser
		if _, err := c.live(t.Context(), "warm "+name, nil); err != nil {
			t.Fatal(err)
		}
	}
	conn, err := c.store.pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	c.pid = conn.Conn().PgConn().PID()
	conn.Release()
	return c
}

// start begins a whole life with the key, which stops before one of its steps, if it comes so far.
func (c *claimer) start(t *testing.T, key string, stopAt int, inside *atomic.Int32) {
	resume, stopped, done := make(chan struct{}), make(chan struct{}), make(chan struct{})
	c.resume, c.stopped, c.done = resume, stopped, done
	c.taken, c.err = nil, nil
	n := 0
	hook := func() {
		if n == stopAt {
			close(stopped)
			<-resume
		}
		n++
	}
	c.hook.Store(&hook)
	go func() {
		defer close(done)
		c.taken, c.err = c.live(t.Context(), key, inside)
		c.hook.Store(nil)
	}()
}

var errOverlap = errors.New("two inside at once")

func (c *claimer) live(ctx context.Context, key string, inside *atomic.Int32) (*store.Taken, error) {
	claim, err := c.store.Claim(ctx, request(key, c.name, time.Minute))
	var taken *store.Taken
	if errors.As(err, &taken) {
		return taken, nil
	}
	if err != nil {
		return nil, err
	}
	ctx = claim.Bind(ctx, holding{})
	if inside != nil {
		if inside.Add(1) != 1 {
			err = errOverlap
		}
		tx, _ := Tx(ctx)
		_, failed := tx.Exec(ctx, "INSERT INTO done VALUES ($1, $2)", key, c.name)
		err = errors.Join(err, failed)
		inside.Add(-1)
	}
	end := store.End{Succeeded: true, Held: true}
	if c.marker {
		end.Marker, end.DoneFor = "done by "+c.name, time.Hour
	}
	work, failed := claim.Release(ctx, end)
	return nil, errors.Join(err, work, failed)
}

// holding is the owner of a lease that is held.
type holding struct{}

func (holding) Lose(store.Gone) {}
func (holding) Ended() error    { return nil }

// comes waits until a claimer has come to its end, has reached what is given, or waits for a row that the other has locked.
func (c *claimer) comes(t *testing.T, admin *pgxpool.Pool, to <-chan struct{}) {
	t.Helper()
	for {
		select {
		case <-to:
			return
		case <-c.done:
			return
		case <-time.After(3 * time.Millisecond):
		}
		var blocked bool
		if err := admin.QueryRow(t.Context(), "SELECT cardinality(pg_blocking_pids($1)) > 0", c.pid).Scan(&blocked); blocked || err != nil {
			return
		}
	}
}

func TestTwoClaimersInterleaveAtEveryStatement(t *testing.T) {
	t.Parallel()
	url := database(t)
	admin := connect(t, url)
	if _, err := admin.Exec(t.Context(), "CREATE TABLE done (key text, name text)"); err != nil {
		t.Fatal(err)
	}
	a, b := newClaimer(t, url, "a"), newClaimer(t, url, "b")
	runs, stops, unknown := 0, map[int]bool{}, 0
	for i := 0; ; i++ {
		furthest := true // a has no step i any more
		for j := 0; ; j++ {
			last := true
			for order := range 2 {
				key := fmt.Sprint(i, "/", j, "/", order)
				a.marker = i%2 == 0
				b.marker = a.marker
				if j%2 == 0 { // the row is there already
					if _, err := admin.Exec(t.Context(), "INSERT INTO redislock_locks (key) VALUES ($1)", key); err != nil {
						t.Fatal(err)
					}
				}
				var inside atomic.Int32
				a.start(t, key, i, &inside)
				a.comes(t, admin, a.stopped)
				b.start(t, key, j, &inside)
				b.comes(t, admin, b.stopped)
				aStops, bStops := isClosed(a.stopped), isClosed(b.stopped)
				furthest, last = furthest && !aStops, last && !bStops
				stops[i] = stops[i] || aStops
				first, second := a, b
				if order == 1 {
					first, second = b, a
				}
				close(first.resume)
				first.comes(t, admin, nil)
				close(second.resume)
				<-a.done
				<-b.done
				runs++
				if wantOneOf(t, admin, key, a, b) {
					unknown++
				}
			}
			if last || t.Failed() {
				break
			}
		}
		if furthest || t.Failed() {
			break
		}
	}
	if runs < 250 || len(stops) < 11 {
		t.Errorf("%d ways, %d steps: that is not every statement", runs, len(stops))
	}
	t.Logf("%d ways to interleave; in %d of them the loser could not tell whose the lock was", runs, unknown)
}

// wantOneOf fails the test unless one of two has done the work, and the other was told who; without a marker the other may have
// done it after the first. It reports whether the other was told that nobody knows.
func wantOneOf(t *testing.T, admin *pgxpool.Pool, key string, a, b *claimer) (unknown bool) {
	t.Helper()
	if a.err != nil || b.err != nil {
		t.Errorf("%s: a: %v, b: %v", key, a.err, b.err)
		return false
	}
	winner, loser := a, b
	if !a.marker && a.taken == nil && b.taken == nil {
		return false
	}
	if a.taken != nil {
		winner, loser = b, a
	}
	var names string
	if err := admin.QueryRow(t.Context(), "SELECT coalesce(string_agg(name, ', '), '') FROM done WHERE key = $1", key).Scan(&names); err != nil {
		t.Error(err)
	}
	if winner.taken != nil || loser.taken == nil || names != winner.name {
		t.Errorf("%s: a was told %v, b %v, and the work was done by %q; want one to do it", key, a.taken, b.taken, names)
		return false
	}
	switch loser.taken.Value {
	case winner.name, "done by " + winner.name:
	case "":
		return true
	default:
		t.Errorf("%s: %s was told that %q has it, which was %s", key, loser.name, loser.taken.Value, winner.name)
	}
	return false
}

func isClosed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

// --- Who has it ---

// farm is a queue, with a server whose handlers run under row locks.
type farm struct {
	*ledger
	client    *asynq.Client
	inspector *asynq.Inspector
}

func newFarm(t *testing.T, handler asynq.Handler, opts ...redislock.Option) *farm {
	t.Helper()
	return farmOn(t, newLedger(t, opts...), handler)
}

func farmOn(t *testing.T, l *ledger, handler asynq.Handler) *farm {
	t.Helper()
	rdb := redis.NewClient(&redis.Options{Addr: miniredis.RunT(t).Addr()})
	t.Cleanup(func() { _ = rdb.Close() })
	f := &farm{ledger: l, client: asynq.NewClientFromRedisClient(rdb), inspector: asynq.NewInspectorFromRedisClient(rdb)}
	server := asynq.NewServerFromRedisClient(rdb, redislock.ServerConfig(asynq.Config{
		Concurrency: 4, LogLevel: asynq.FatalLevel, ShutdownTimeout: time.Second,
		TaskCheckInterval: 10 * time.Millisecond, DelayedTaskCheckInterval: 20 * time.Millisecond,
		RetryDelayFunc: func(int, error, *asynq.Task) time.Duration { return 0 },
	}))
	if err := server.Start(l.locker.Middleware(handler)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Shutdown)
	return f
}

func (f *farm) enqueue(t *testing.T, id string, opts ...asynq.Option) {
	t.Helper()
	if _, err := f.client.Enqueue(asynq.NewTask("print", nil), append(opts, asynq.TaskID(id))...); err != nil {
		t.Fatal(err)
	}
}

// sees waits until the books have an event of a kind for a task, and returns it.
func (f *farm) sees(t *testing.T, id string, kind redislock.EventKind) (e redislock.Event) {
	t.Helper()
	eventually(t, fmt.Sprintf("task %s %s", id, kind), func(context.Context) bool {
		for _, e = range f.books.of(kind) {
			if e.TaskID == id {
				return true
			}
		}
		return false
	})
	return e
}

func TestATaskLearnsWhoHasItsLockAndWhoseMarkerIsThere(t *testing.T) {
	t.Parallel()
	running, finish := make(chan struct{}), make(chan struct{})
	f := newFarm(t, asynq.HandlerFunc(func(ctx context.Context, _ *asynq.Task) error {
		close(running)
		<-finish
		return write(ctx, 1)
	}), redislock.WithDoneFor(time.Hour), redislock.WithTTL(4*time.Second))
	name, err := f.locker.Name(t.Context(), asynq.NewTask("print", nil))
	if err != nil {
		t.Fatal(err)
	}
	check := func(what string, h redislock.Holder, done bool) {
		t.Helper()
		if h.TaskID != "first" || h.TaskType != "print" || h.Queue != "default" || h.Done != done {
			t.Errorf("%s names %+v", what, h)
		}
	}
	holder := func(done bool) {
		t.Helper()
		h, ok, err := f.locker.Holder(t.Context(), name)
		if !ok || err != nil {
			t.Error(ok, err)
		}
		check("Holder", h, done)
		var held *redislock.HeldError
		want := map[bool]error{false: redislock.ErrHeld, true: redislock.ErrDone}[done]
		if _, err := f.locker.TryAcquire(t.Context(), name); !errors.As(err, &held) || !errors.Is(err, want) {
			t.Fatalf("%v, want %v", err, want)
		}
		check("HeldError", held.Holder, done)
	}
	f.enqueue(t, "first")
	<-running
	holder(false)
	f.enqueue(t, "second")
	check("the event", f.sees(t, "second", redislock.EventRequeued).Holder, false)
	close(finish)
	f.sees(t, "first", redislock.EventRan)
	holder(true)
	check("the event", f.sees(t, "second", redislock.EventDone).Holder, true)
	f.wantWritten(t, 1)
}

func TestTheSameTaskIsPutBackNotSkipped(t *testing.T) {
	t.Parallel()
	for name, again := range map[string]func(t *testing.T, f *farm, first context.Context){
		"after a timeout": func(*testing.T, *farm, context.Context) {},
		"with the ID of one that was deleted": func(t *testing.T, f *farm, first context.Context) {
			wantEnd(t, first) // asynq has settled it
			eventually(t, "task deleted", func(context.Context) bool { return f.inspector.DeleteTask("default", "one") == nil })
			f.enqueue(t, "one", asynq.MaxRetry(2))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			finish, contexts := make(chan struct{}), make(chan context.Context, 9)
			var inside atomic.Int32
			f := newFarm(t, asynq.HandlerFunc(func(ctx context.Context, _ *asynq.Task) error {
				if inside.Add(1) != 1 {
					t.Error("two at once")
				}
				defer inside.Add(-1)
				contexts <- ctx
				<-finish
				return write(ctx, 1)
			}), redislock.WithPolicy(redislock.Skip()), redislock.WithTTL(2*time.Second), redislock.WithDoneFor(time.Hour))
			opts := []asynq.Option{asynq.MaxRetry(3), asynq.Timeout(time.Second)}
			if name != "after a timeout" {
				opts = []asynq.Option{asynq.MaxRetry(0), asynq.Timeout(time.Second)} // archived, where it can be deleted
			}
			f.enqueue(t, "one", opts...)
			again(t, f, <-contexts)
			if e := f.sees(t, "one", redislock.EventRequeued); e.Holder.TaskID != "one" {
				t.Errorf("put back because of %+v", e.Holder)
			}
			close(finish)
			f.sees(t, "one", redislock.EventDone) // the first run was late, and yet it counts
			f.wantWritten(t, 1)
			if n := len(f.books.of(redislock.EventSkipped, redislock.EventArchived, redislock.EventRefused)); n > 0 {
				t.Errorf("the books say %s", &f.books)
			}
		})
	}
}

func TestALastAttemptWaitsInPlace(t *testing.T) {
	t.Parallel()
	l := newLedger(t, redislock.WithTTL(2*time.Second))
	name, err := l.locker.Name(t.Context(), asynq.NewTask("print", nil))
	if err != nil {
		t.Fatal(err)
	}
	k, err := l.locker.TryAcquire(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	ran := make(chan error, 1)
	pool := connect(t, l.url)
	l.locker = locker(t, pool, &l.books, redislock.WithPolicy(redislock.Retry(0)))
	f := farmOn(t, l, asynq.HandlerFunc(func(ctx context.Context, _ *asynq.Task) error {
		err := write(ctx, 1)
		ran <- err
		return err
	}))
	f.enqueue(t, "last", asynq.MaxRetry(0), asynq.Timeout(time.Minute))
	eventually(t, "task has tried", func(context.Context) bool { return pool.Stat().AcquireCount() >= 2 })
	if err := k.Release(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-ran; err != nil {
		t.Error(err)
	}
	if e := f.sees(t, "last", redislock.EventRan); e.Err != nil {
		t.Error(e.Err)
	}
	l.wantWritten(t, 1)
	l.books.want(t, "acquired=2 ran=1 released=2")
}

func TestAnUnknownHolderIsNeverSkipped(t *testing.T) {
	l := newLedger(t, redislock.WithPolicy(redislock.Skip()))
	fail := func(context.Context) error { return errors.New("it ran") }
	if err := task(t.Context(), l.locker, fail); err == nil { // makes the row
		t.Fatal("it did not run")
	}
	tx, err := l.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	if _, err := tx.Exec(t.Context(), "DELETE FROM redislock_holders"); err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if tx, err = l.pool.Begin(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), "SELECT FROM redislock_locks FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	var held *redislock.HeldError
	if err := task(t.Context(), l.locker, fail); !errors.As(err, &held) || held.Holder != (redislock.Holder{}) {
		t.Errorf("%v; want a *HeldError that names nobody", err)
	}
	l.books.want(t, "acquired=1 ran=1 released=1 requeued=1")
}

func TestAMarkerCountsForItsTimeByTheClockOfTheDatabase(t *testing.T) {
	l := newLedger(t, redislock.WithDoneFor(time.Hour))
	do := func() error {
		return l.locker.Do(t.Context(), "job", func(ctx context.Context) error { return write(ctx, 1) })
	}
	if err := do(); err != nil {
		t.Fatal(err)
	}
	var left time.Duration
	if err := l.pool.QueryRow(t.Context(), "SELECT expires - clock_timestamp() FROM redislock_locks").Scan(&left); err != nil || left > time.Hour || left < 59*time.Minute {
		t.Errorf("marker for %v (%v), want an hour", left, err)
	}
	l.exec(t, "UPDATE redislock_locks SET expires = clock_timestamp() + interval '5 minutes'")
	if err := do(); !errors.Is(err, redislock.ErrDone) {
		t.Errorf("before its time: %v, want ErrDone", err)
	}
	l.exec(t, "UPDATE redislock_locks SET expires = clock_timestamp()")
	if h, ok, err := l.locker.Holder(t.Context(), "job"); ok || err != nil {
		t.Errorf("after its time: holder %v, %v", h, err)
	}
	if err := do(); err != nil {
		t.Errorf("after its time: %v", err)
	}
	l.wantWritten(t, 1, 1)
}

// --- Policies ---

func TestAPolicyDecides(t *testing.T) {
	decided := errors.New("decided")
	for name, c := range map[string]struct {
		policy redislock.Policy
		want   func(error) bool
		books  string
	}{
		"Skip":    {redislock.Skip(), func(err error) bool { return err == nil }, "acquired=1 ran=1 released=1 skipped=1"},
		"Retry":   {redislock.Retry(0), isHeld, "acquired=1 ran=1 released=1 requeued=1"},
		"Wait":    {redislock.Wait(time.Millisecond), isHeld, "acquired=1 ran=1 released=1 requeued=1"},
		"Archive": {redislock.Archive(), func(err error) bool { return errors.Is(err, asynq.SkipRetry) && isHeld(err) }, "acquired=1 archived=1 ran=1 released=1"},
		"PolicyFunc": {redislock.PolicyFunc(func(_ context.Context, _ *asynq.Task, held *redislock.HeldError) error {
			return fmt.Errorf("%w: %s", decided, held.Holder.TaskType)
		}), func(err error) bool { return errors.Is(err, decided) && strings.HasSuffix(err.Error(), "print") }, "acquired=1 ran=1 refused=1 released=1"},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLedger(t)
			var b books
			one, other := locker(t, l.pool, &b), locker(t, connect(t, l.url), &b, redislock.WithPolicy(c.policy))
			err := task(t.Context(), one, func(ctx context.Context) error {
				err := task(t.Context(), other, func(context.Context) error {
					t.Error("two at once")
					return nil
				})
				if !c.want(err) {
					t.Errorf("result: %v", err)
				}
				return write(ctx, 1)
			})
			if err != nil {
				t.Error(err)
			}
			l.wantWritten(t, 1)
			b.want(t, c.books)
		})
	}
}

func isHeld(err error) bool { return errors.Is(err, redislock.ErrHeld) }

// request is a claim with a minute to be made.
func request(key, value string, ttl time.Duration) store.Request {
	return store.Request{Key: key, Value: value, TTL: ttl, Until: time.Now().Add(time.Minute)}
}

func TestAWaiterGetsTheLockWhenItIsReleased(t *testing.T) {
	for _, where := range []string{"here", "elsewhere"} {
		t.Run(where, func(t *testing.T) {
			var named atomic.Int64 // tasks: here, the other one asks nobody else
			opts := redislock.Options(redislock.WithPolicy(redislock.Wait(time.Minute)),
				redislock.WithKey(func(ctx context.Context, task *asynq.Task) (string, error) {
					named.Add(1)
					return redislock.ByTypeAndPayload(ctx, task)
				}))
			l := newLedger(t, opts)
			waits, pool, looks := l.locker, l.pool, int64(0)
			if where == "elsewhere" {
				pool, looks = connect(t, l.url), 2
				waits = locker(t, pool, &l.books, opts)
			}
			waited := make(chan error, 1)
			err := task(t.Context(), l.locker, func(ctx context.Context) error {
				before := pool.Stat().AcquireCount()
				go func() { waited <- task(t.Context(), waits, func(ctx context.Context) error { return write(ctx, 2) }) }()
				eventually(t, "the other has tried", func(context.Context) bool { return named.Load() == 2 && pool.Stat().AcquireCount() >= before+looks })
				return write(ctx, 1)
			})
			if err := errors.Join(err, <-waited); err != nil {
				t.Error(err)
			}
			l.wantWritten(t, 1, 2)
			l.books.want(t, "acquired=2 ran=2 released=2")
		})
	}
}

func TestNoLockPassesWithoutATransaction(t *testing.T) {
	l := newLedger(t, redislock.WithKey(func(context.Context, *asynq.Task) (string, error) { return "", redislock.NoLock }))
	err := task(t.Context(), l.locker, func(ctx context.Context) error {
		if tx, ok := Tx(ctx); ok {
			t.Errorf("transaction %v", tx)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	l.books.want(t, "passed=1")
}

// --- ForceRelease ---

func TestForceReleaseOfAMarkerLetsTheWorkRunAgain(t *testing.T) {
	l := newLedger(t, redislock.WithDoneFor(time.Hour))
	do := func() error {
		return l.locker.Do(t.Context(), "job", func(ctx context.Context) error { return write(ctx, 1) })
	}
	if err := do(); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second frees what is free
		if err := l.locker.ForceRelease(t.Context(), "job"); err != nil {
			t.Error(err)
		}
	}
	if err := do(); err != nil {
		t.Errorf("after ForceRelease: %v", err)
	}
	l.wantWritten(t, 1, 1)
}

func TestForceReleaseTakesTheLockFromARunningHolder(t *testing.T) {
	t.Parallel()
	l := newLedger(t, redislock.WithTTL(time.Second), redislock.WithDoneFor(time.Hour))
	err := do(t.Context(), l.locker, "job", func(ctx context.Context) error {
		if err := write(ctx, 1); err != nil {
			return err
		}
		if err := l.locker.ForceRelease(ctx, "job"); err != nil {
			t.Error(err)
		}
		eventually(t, "lock free", func(ctx context.Context) bool {
			k, err := l.other.TryAcquire(ctx, "job")
			return err == nil && k.Release(ctx) == nil
		})
		wantEnd(t, ctx)
		if cause := context.Cause(ctx); !errors.Is(cause, redislock.ErrLost) {
			t.Errorf("its context ended with %v", cause)
		}
		return nil
	})
	if !errors.Is(err, redislock.ErrLost) {
		t.Errorf("its nil became %v, want ErrLost", err)
	}
	l.wantWritten(t)
	l.wantFree(t, "job")
}

// The session that frees a marker locks its row for a moment, in which the marker may expire, and may have asked for the same key
// before.
func TestNobodyIsTakenForTheHolderWhileAMarkerIsFreed(t *testing.T) {
	t.Parallel()
	url := database(t)
	admin, look := connect(t, url), rowStore{connect(t, url)}
	frees := newClaimer(t, url, "stale")
	if err := frees.store.Free(t.Context(), "warm stale"); err != nil { // prepares
		t.Fatal(err)
	}
	stops := 0
	for i := 0; ; i++ {
		key := fmt.Sprint("job", i)
		frees.start(t, key, -1, nil) // leaves a marker, and its value in redislock_holders
		<-frees.done
		frees.start(t, key, -1, nil)
		<-frees.done
		if frees.err != nil || frees.taken == nil || frees.taken.Value != "done by stale" {
			t.Fatal(frees.taken, frees.err)
		}
		if _, err := admin.Exec(t.Context(), "UPDATE redislock_locks SET expires = clock_timestamp() + interval '300 ms' WHERE key = $1", key); err != nil {
			t.Fatal(err)
		}
		stopped, resume, freed, n := make(chan struct{}), make(chan struct{}), make(chan error, 1), 0
		hook := func() {
			if n == i {
				close(stopped)
				<-resume
			}
			n++
		}
		frees.hook.Store(&hook)
		go func() { freed <- frees.store.Free(t.Context(), key) }()
		var err error
		select {
		case <-stopped:
			stops++
			eventually(t, "marker expired", func(ctx context.Context) (expired bool) {
				err := admin.QueryRow(ctx, "SELECT expires <= clock_timestamp() FROM redislock_locks WHERE key = $1", key).Scan(&expired)
				return expired || errors.Is(err, pgx.ErrNoRows)
			})
			claim, claimErr := look.Claim(t.Context(), request(key, "looks", time.Minute))
			var taken *store.Taken
			switch {
			case claimErr == nil:
				claim.GiveBack(t.Context())
			case !errors.As(claimErr, &taken):
				t.Error(claimErr)
			case taken.Value != "":
				t.Errorf("step %d: %q is taken for the holder", i, taken.Value)
			}
			close(resume)
			err = <-freed
		case err = <-freed:
		}
		frees.hook.Store(nil)
		if err != nil {
			t.Fatal(err)
		}
		if !isClosed(stopped) {
			break
		}
	}
	if stops < 5 {
		t.Errorf("stopped %d times, want before each of three statements, and before the ends of two", stops)
	}
}

// --- Loss ---

func TestALostSessionEndsTheHandlerAndItsWork(t *testing.T) {
	t.Parallel()
	type network struct {
		*proxy
		admin *pgxpool.Pool
	}
	kill := func(t *testing.T, n network, pid uint32) {
		if _, err := n.admin.Exec(t.Context(), "SELECT pg_terminate_backend($1)", int32(pid)); err != nil {
			t.Error(err)
		}
	}
	cut := func(_ *testing.T, n network, _ uint32) { n.cut() }
	hang := func(t *testing.T, n network, _ uint32) {
		n.hang()
		t.Cleanup(n.restore)
	}
	for name, c := range map[string]struct {
		lose    func(*testing.T, network, uint32)
		inQuery bool
	}{
		"idle, terminated":     {kill, false},
		"in query, terminated": {kill, true},
		"idle, cut":            {cut, false},
		"in query, cut":        {cut, true},
		"idle, silent":         {hang, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLedger(t)
			p := newProxy(t, l.url)
			opts := redislock.Options(redislock.WithTTL(time.Second), redislock.WithDoneFor(time.Hour))
			var b books
			shaky := locker(t, connect(t, l.url, p.through), &b, opts)
			n := network{p, l.pool}
			err := do(t.Context(), shaky, "job", func(ctx context.Context) error {
				tx, _ := Tx(ctx)
				var pid uint32
				if err := tx.QueryRow(ctx, "SELECT pg_backend_pid()").Scan(&pid); err != nil {
					t.Error(err)
				}
				if err := write(ctx, 1); err != nil {
					t.Error(err)
				}
				if c.inQuery {
					go func() {
						eventually(t, "in its query", func(ctx context.Context) bool {
							var state string
							err := l.pool.QueryRow(ctx, "SELECT state FROM pg_stat_activity WHERE pid = $1 AND query LIKE '%pg_sleep%'", int32(pid)).Scan(&state)
							return err == nil && state == "active"
						})
						c.lose(t, n, pid)
					}()
					if _, err := tx.Exec(context.WithoutCancel(ctx), "SELECT pg_sleep(5)"); err == nil {
						t.Error("the query came to its end")
					}
				} else {
					c.lose(t, n, pid)
				}
				wantEnd(t, ctx)
				if cause := context.Cause(ctx); !errors.Is(cause, redislock.ErrLost) {
					t.Errorf("its context ended with %v", cause)
				}
				if err := write(ctx, 2); !errors.Is(err, redislock.ErrLost) {
					t.Errorf("its late write: %v, want ErrLost", err)
				}
				return nil
			})
			if !errors.Is(err, redislock.ErrLost) {
				t.Errorf("its nil became %v, want ErrLost", err)
			}
			b.want(t, "acquired=1 lost=1")
			eventually(t, "lock free, without a marker", func(ctx context.Context) bool {
				k, err := l.other.TryAcquire(ctx, "job")
				return err == nil && k.Release(ctx) == nil
			})
			l.wantWritten(t)
		})
	}
}

func TestAServerThatWentAwayTakesTheWorkAlong(t *testing.T) {
	t.Parallel()
	server := ownServer(t)
	url := server.URL("postgres")
	migrate(t, connect(t, url))
	l := ledgerAt(t, url, redislock.WithTTL(time.Second), redislock.WithDoneFor(time.Hour))
	for name, away := range map[string]func() error{
		"crashed":   func() error { server.Crash(); return nil },
		"restarted": server.Restart,
	} {
		err := do(t.Context(), l.locker, name, func(ctx context.Context) error {
			if err := write(ctx, 1); err != nil {
				t.Error(err)
			}
			if err := away(); err != nil {
				t.Error(err)
			}
			wantEnd(t, ctx)
			if cause := context.Cause(ctx); !errors.Is(cause, redislock.ErrLost) {
				t.Errorf("%s: its context ended with %v", name, cause)
			}
			return nil
		})
		if !errors.Is(err, redislock.ErrLost) {
			t.Errorf("%s: its nil became %v, want ErrLost", name, err)
		}
		if name == "crashed" {
			err := l.locker.Do(t.Context(), name, func(context.Context) error { return errors.New("it ran") })
			if !errors.Is(err, redislock.ErrUnavailable) {
				t.Errorf("while the server is away: %v, want ErrUnavailable", err)
			}
			if err := server.Restart(); err != nil {
				t.Fatal(err)
			}
		}
		eventually(t, name+": the lock works again", func(ctx context.Context) bool {
			k, err := l.other.TryAcquire(ctx, name)
			return err == nil && k.Release(ctx) == nil
		})
		l.wantWritten(t)
	}
}

// A holder that stands still is not asked for a sign of life. PostgreSQL gives its lock away, and refuses what it does later.
func TestAPausedHoldersWritesAndCommitAreRefusedByTheServer(t *testing.T) {
	t.Parallel()
	l := newLedger(t)
	paused := rowStore{connect(t, l.url)}
	claim, err := paused.Claim(t.Context(), request("job", "paused", time.Second))
	if err != nil {
		t.Fatal(err)
	}
	ctx := claim.Bind(t.Context(), holding{})
	if err := write(ctx, 1); err != nil {
		t.Error(err)
	}
	other := rowStore{l.pool}
	var next store.Claim
	eventually(t, "somebody else has the lock", func(ctx context.Context) bool {
		next, err = other.Claim(ctx, request("job", "next", time.Minute))
		var taken *store.Taken
		if err != nil && (!errors.As(err, &taken) || taken.Value != "paused" && taken.Value != "") {
			t.Error(err)
		}
		return err == nil
	})
	if err := write(ctx, 2); err == nil {
		t.Error("its late write was taken")
	}
	if work, _ := claim.Release(ctx, store.End{Succeeded: true, Held: true, Marker: "done", DoneFor: time.Hour}); work == nil {
		t.Error("its late commit was taken")
	}
	if _, ok, err := other.Read(t.Context(), "job"); !ok || err != nil {
		t.Error("the next holder has lost its lock", err)
	}
	next.GiveBack(t.Context())
	l.wantWritten(t)
	if v, ok, err := other.Read(t.Context(), "job"); ok || err != nil {
		t.Errorf("at the key: %q, %v", v, err)
	}
}

func TestAHolderCutOffFromTheNetworkLosesItsLockAndWhatItHeldBackIsRefused(t *testing.T) {
	t.Parallel()
	l := newLedger(t)
	p := newProxy(t, l.url)
	var b books
	shaky := locker(t, connect(t, l.url, p.through), &b, redislock.WithTTL(time.Second))
	err := do(t.Context(), shaky, "job", func(ctx context.Context) error {
		tx, _ := Tx(ctx)
		if err := write(ctx, 1); err != nil {
			t.Error(err)
		}
		p.hang()
		sent := make(chan error, 1)
		go func() { // on its way when the network is back
			_, err := tx.Exec(context.WithoutCancel(ctx), insert, 2)
			sent <- err
		}()
		var next *redislock.Lock
		eventually(t, "somebody else has the lock", func(ctx context.Context) (ok bool) {
			k, err := l.other.TryAcquire(ctx, "job")
			next = k
			return err == nil
		})
		p.restore()
		if err := <-sent; err == nil {
			t.Error("the write that was held back was taken")
		}
		if err := write(ctx, 3); !errors.Is(err, redislock.ErrLost) {
			t.Errorf("its late write: %v, want ErrLost", err)
		}
		return next.Release(t.Context())
	})
	if !errors.Is(err, redislock.ErrLost) {
		t.Errorf("its nil became %v, want ErrLost", err)
	}
	l.wantWritten(t)
}

func TestALongHandlerKeepsItsLock(t *testing.T) {
	t.Parallel()
	for name, work := range map[string]func(context.Context, pgx.Tx) error{
		"between two statements": func(ctx context.Context, _ pgx.Tx) error {
			select {
			case <-time.After(3500 * time.Millisecond):
				return nil
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		},
		"in one statement": func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, "SELECT pg_sleep(3.5)")
			return err
		},
		"on a savepoint": func(ctx context.Context, tx pgx.Tx) error {
			return pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
				time.Sleep(2500 * time.Millisecond)
				return nil
			})
		},
		"in an aborted transaction within": func(ctx context.Context, tx pgx.Tx) error {
			within, err := tx.Begin(ctx)
			if err != nil {
				return err
			}
			_, _ = within.Exec(ctx, "SELECT 1/0")
			time.Sleep(2500 * time.Millisecond)
			return within.Rollback(ctx)
		},
		"with statements now and then": func(ctx context.Context, tx pgx.Tx) error {
			for range 70 {
				if _, err := tx.Exec(ctx, "SELECT pg_sleep(0.02)"); err != nil {
					return err
				}
				time.Sleep(20 * time.Millisecond)
			}
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLedger(t, redislock.WithTTL(time.Second))
			err := do(t.Context(), l.locker, "job", func(ctx context.Context) error {
				tx, _ := Tx(ctx)
				if err := work(ctx, tx); err != nil {
					return err
				}
				if _, err := l.other.TryAcquire(t.Context(), "job"); !errors.Is(err, redislock.ErrHeld) {
					t.Errorf("somebody else: %v, want ErrHeld", err)
				}
				return write(ctx, 1)
			})
			if err != nil {
				t.Fatal(err)
			}
			l.wantWritten(t, 1)
			l.books.want(t, "acquired=1 released=1")
		})
	}
}

func TestADeafHandlerKeepsItsLockForTheGracePeriod(t *testing.T) {
	t.Parallel()
	for name, deaf := range map[string]struct {
		grace     time.Duration
		abandoned bool
	}{"returns in time": {time.Hour, false}, "does not": {0, true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLedger(t, redislock.WithTTL(time.Second), redislock.WithGracePeriod(deaf.grace))
			ctx, cancel := context.WithCancel(t.Context())
			err := do(ctx, l.locker, "job", func(ctx context.Context) error {
				if err := write(ctx, 1); err != nil {
					return err
				}
				cancel()
				<-ctx.Done()
				if !deaf.abandoned {
					time.Sleep(1500 * time.Millisecond) // longer than its transaction may idle
					if _, err := l.other.TryAcquire(t.Context(), "job"); !errors.Is(err, redislock.ErrHeld) {
						t.Errorf("somebody else: %v, want ErrHeld", err)
					}
					return write(ctx, 2)
				}
				eventually(t, "abandoned", func(context.Context) bool { return len(l.books.of(redislock.EventAbandoned)) == 1 })
				if err := write(ctx, 2); !errors.Is(err, redislock.ErrLost) {
					t.Errorf("its late write: %v, want ErrLost", err)
				}
				eventually(t, "somebody else has the lock", func(ctx context.Context) bool {
					k, err := l.other.TryAcquire(ctx, "job")
					return err == nil && k.Release(ctx) == nil
				})
				return nil
			})
			if deaf.abandoned {
				if !errors.Is(err, redislock.ErrLost) {
					t.Errorf("its nil became %v, want ErrLost", err)
				}
				l.wantWritten(t)
				return
			}
			if err != nil {
				t.Error(err)
			}
			l.wantWritten(t, 1, 2)
		})
	}
}

// --- Resources ---

func TestWithoutAConnectionATaskIsPutBack(t *testing.T) {
	t.Parallel()
	l := newLedger(t)
	var b books
	pool := connect(t, l.url, func(c *pgxpool.Config) { c.MaxConns = 1 })
	small := locker(t, pool, &b, redislock.WithTTL(time.Second), redislock.WithPolicy(redislock.Skip()))
	ran := func(ctx context.Context) error { return write(ctx, 1) }
	err := do(t.Context(), small, "job", func(context.Context) error {
		for range 3 {
			if err := task(t.Context(), small, ran); !errors.Is(err, redislock.ErrUnavailable) {
				t.Errorf("%v, want ErrUnavailable", err)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	eventually(t, "it runs when there is one", func(ctx context.Context) bool { return task(ctx, small, ran) == nil })
	l.wantWritten(t, 1)
}

func TestADatabaseThatCannotBeUsedIsNamedForWhatItIs(t *testing.T) {
	url := database(t)
	admin := connect(t, url)
	role := "reader_of_" + admin.Config().ConnConfig.Database
	if _, err := admin.Exec(t.Context(), "CREATE ROLE "+role+" LOGIN"); err != nil {
		t.Fatal(err)
	}
	user := func(name string) func(*pgxpool.Config) {
		return func(c *pgxpool.Config) { c.ConnConfig.User = name }
	}
	closed := connect(t, url)
	closed.Close()
	for name, c := range map[string]struct {
		pool        *pgxpool.Pool
		unavailable bool
		says        string
	}{
		"no tables":     {connect(t, emptyDatabase(t)), false, "pgfence.Migrate"},
		"no permission": {connect(t, url, user(role)), false, "permission denied"},
		"no such user":  {connect(t, url, user("nobody_at_all")), false, "nobody_at_all"},
		"read-only": {connect(t, url, func(c *pgxpool.Config) {
			c.ConnConfig.RuntimeParams["default_transaction_read_only"] = "on"
		}), true, "read-only"},
		"no server": {connect(t, url, func(c *pgxpool.Config) { c.ConnConfig.Port = 1 }), true, "refused"},
		"closed":    {closed, true, "closed"},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			var b books
			l := locker(t, c.pool, &b, redislock.WithTTL(10*time.Second))
			check := func(what string, err error) {
				t.Helper()
				if err == nil || errors.Is(err, redislock.ErrUnavailable) != c.unavailable || !strings.Contains(err.Error(), c.says) {
					t.Errorf("%s: %v; want unavailable %v, and %q", what, err, c.unavailable, c.says)
				}
			}
			for range 12 { // more than the pool has connections
				check("task", task(ctx, l, func(context.Context) error { return errors.New("it ran") }))
			}
			outcome := "refused=12"
			if c.unavailable {
				outcome = "requeued=12"
			}
			b.want(t, outcome)
			if name != "read-only" {
				_, _, err := l.Holder(ctx, "job")
				check("Holder", err)
			}
			check("ForceRelease", l.ForceRelease(ctx, "job"))
		})
	}
}

func TestATryThatEndsAtAnyMomentLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	l := newLedger(t)
	pool := connect(t, l.url)
	var b books
	hasty := locker(t, pool, &b)
	var began time.Time
	for i := range 4 {
		if i == 1 { // the first has connected
			began = time.Now()
		}
		if err := hasty.Do(t.Context(), "job", func(context.Context) error { return nil }); err != nil {
			t.Fatal(err)
		}
	}
	usual, got := time.Since(began)/3, 0
	for i := range 120 {
		ctx, cancel := context.WithCancel(t.Context())
		timer := time.AfterFunc(rand.N(usual), cancel)
		k, err := hasty.TryAcquire(ctx, fmt.Sprintf("job%d", i%5))
		timer.Stop()
		cancel()
		switch {
		case err == nil:
			got++
			if err := k.Release(t.Context()); err != nil {
				t.Error(err)
			}
		case !errors.Is(err, redislock.ErrUnavailable) && !errors.Is(err, redislock.ErrHeld): // held by the one before, for a moment
			t.Error(err)
		}
	}
	if got == 120 {
		t.Error("no try was ended")
	}
	eventually(t, "all connections are back", func(context.Context) bool { return pool.Stat().AcquiredConns() == 0 })
	for i := range 5 {
		eventually(t, "row free", func(ctx context.Context) bool {
			k, err := l.locker.TryAcquire(ctx, fmt.Sprintf("job%d", i))
			return err == nil && k.Release(ctx) == nil
		})
	}
}

// --- Shutdown ---

// slowCommit makes a handler whose commit waits until the test lets it go on: for another who has written the same number.
func slowCommit(t *testing.T, l *ledger) (handler func(context.Context) error, goOn func()) {
	t.Helper()
	l.exec(t, "ALTER TABLE ledger ADD UNIQUE (n) DEFERRABLE INITIALLY DEFERRED")
	other, err := l.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := other.Exec(t.Context(), insert, 1); err != nil {
		t.Fatal(err)
	}
	goOn = sync.OnceFunc(func() { _ = other.Rollback(context.Background()) })
	t.Cleanup(goOn)
	return func(ctx context.Context) error { return write(ctx, 1) }, goOn
}

// committing waits until a commit is under way.
func committing(t *testing.T, l *ledger) {
	t.Helper()
	eventually(t, "commit under way", func(ctx context.Context) bool {
		var n int
		err := l.pool.QueryRow(ctx, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
AND state = 'active' AND wait_event_type = 'Lock' AND query = 'commit'`).Scan(&n)
		return err == nil && n == 1
	})
}

func TestShutdownWaitsForACommitUnderWay(t *testing.T) {
	l := newLedger(t, redislock.WithDoneFor(time.Hour))
	handler, goOn := slowCommit(t, l)
	done, closed := make(chan error, 1), make(chan error, 1)
	go func() { done <- l.locker.Do(t.Context(), "job", handler) }()
	committing(t, l)
	go func() { closed <- l.locker.Shutdown(t.Context()) }()
	eventually(t, "shutdown has begun", func(ctx context.Context) bool {
		k, err := l.locker.TryAcquire(ctx, "another")
		if err == nil {
			err = k.Release(ctx)
		}
		return errors.Is(err, redislock.ErrClosed)
	})
	select {
	case err := <-closed:
		t.Errorf("shutdown did not wait: %v", err)
	default:
	}
	goOn()
	if err := <-closed; err != nil {
		t.Error(err)
	}
	l.wantWritten(t, 1) // at once
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestAShutdownWithoutPatienceLeavesACommitUnderWayAlone(t *testing.T) {
	l := newLedger(t, redislock.WithDoneFor(time.Hour))
	handler, goOn := slowCommit(t, l)
	done := make(chan error, 1)
	go func() { done <- l.locker.Do(t.Context(), "job", handler) }()
	committing(t, l)
	impatient, cancel := context.WithCancel(t.Context())
	cancel()
	if err := l.locker.Shutdown(impatient); !errors.Is(err, context.Canceled) {
		t.Errorf("shutdown: %v", err)
	}
	goOn()
	if err := <-done; err != nil {
		t.Errorf("the commit went through, and yet: %v", err)
	}
	l.wantWritten(t, 1)
}

func TestAShutdownWithoutPatienceAbandonsWhatRuns(t *testing.T) {
	l := newLedger(t, redislock.WithDoneFor(time.Hour))
	impatient, cancel := context.WithCancel(t.Context())
	cancel()
	err := l.locker.Do(t.Context(), "job", func(ctx context.Context) error {
		if err := write(ctx, 1); err != nil {
			return err
		}
		if err := l.locker.Shutdown(impatient); !errors.Is(err, context.Canceled) {
			t.Errorf("shutdown: %v", err)
		}
		wantEnd(t, ctx)
		if cause := context.Cause(ctx); !errors.Is(cause, redislock.ErrClosed) {
			t.Errorf("its context ended with %v, want ErrClosed", cause)
		}
		if err := write(ctx, 2); !errors.Is(err, redislock.ErrLost) {
			t.Errorf("its late write: %v, want ErrLost", err)
		}
		return nil
	})
	if !errors.Is(err, redislock.ErrLost) {
		t.Errorf("its nil became %v, want ErrLost", err)
	}
	l.wantWritten(t)
	l.books.want(t, "abandoned=1 acquired=1")
}

// --- The tables ---

func TestSweepTakesWhatIsOfNoUseAndNothingElse(t *testing.T) {
	l := newLedger(t)
	l.exec(t, `INSERT INTO redislock_locks (key, value, expires) VALUES
  ('old', NULL, now() - interval '2 hours'), ('old marker', 'x', now() - interval '61 minutes'), ('lately', NULL, now() - interval '59 minutes'),
  ('marker', 'x', now() + interval '1 minute'), ('locked', NULL, now() - interval '2 hours'), ('mine', NULL, now() - interval '2 hours'),
  ('theirs', NULL, now() - interval '2 hours')`)
	locks, err := l.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = locks.Rollback(context.Background()) }()
	if _, err := locks.Exec(t.Context(), "SELECT FROM redislock_locks WHERE key = 'locked' FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	err = l.pool.AcquireFunc(t.Context(), func(conn *pgxpool.Conn) error {
		_, err := conn.Exec(t.Context(), `INSERT INTO redislock_holders VALUES (pg_backend_pid(), 'mine', 'x'), (-1, 'theirs', 'x')`)
		_, failed := conn.Exec(t.Context(), sweep)
		_, again := conn.Exec(t.Context(), sweepHolders)
		return errors.Join(err, failed, again)
	})
	if err != nil {
		t.Fatal(err)
	}
	for table, want := range map[string]string{"redislock_locks": "lately locked marker mine", "redislock_holders": "mine"} {
		var got string
		if err := l.pool.QueryRow(t.Context(), "SELECT string_agg(key, ' ' ORDER BY key) FROM "+table).Scan(&got); err != nil || got != want {
			t.Errorf("%s has %q (%v), want %q", table, got, err, want)
		}
	}
}

func TestTheTablesDoNotGrowWithoutBound(t *testing.T) {
	t.Parallel()
	l := newLedger(t, redislock.WithDoneFor(time.Minute))
	l.exec(t, "INSERT INTO redislock_locks (key, value, expires) SELECT 'old' || i, 'x', now() - interval '2 hours' FROM generate_series(1, 300) i")
	l.exec(t, "INSERT INTO redislock_holders SELECT -i, 'old' || i, 'x' FROM generate_series(1, 300) i")
	n := 0
	eventually(t, "what is old is gone", func(ctx context.Context) bool {
		for range 20 {
			n++
			if err := l.locker.Do(ctx, fmt.Sprintf("job%d", n), func(context.Context) error { return nil }); err != nil {
				t.Error(err)
			}
		}
		var left int
		err := l.pool.QueryRow(ctx, "SELECT (SELECT count(*) FROM redislock_locks WHERE key LIKE 'old%') + (SELECT count(*) FROM redislock_holders WHERE pid < 0)").Scan(&left)
		return err == nil && left == 0
	})
	var locks, holders int
	if err := l.pool.QueryRow(t.Context(), "SELECT (SELECT count(*) FROM redislock_locks), (SELECT count(*) FROM redislock_holders)").Scan(&locks, &holders); err != nil {
		t.Fatal(err)
	}
	if locks != n || holders > 10 {
		t.Errorf("%d rows of locks and %d of holders, want %d with markers, and one for each session at most", locks, holders, n)
	}
}

func TestTheTablesMayBeInASchemaOfTheirOwn(t *testing.T) {
	url := emptyDatabase(t)
	admin := connect(t, url)
	if _, err := admin.Exec(t.Context(), "CREATE SCHEMA jobs; SET search_path TO jobs; "+schema+"; RESET search_path"); err != nil {
		t.Fatal(err)
	}
	l := ledgerAt(t, url+"&search_path=jobs", redislock.WithDoneFor(time.Hour))
	migrate(t, l.pool) // which changes nothing
	err := l.locker.Do(t.Context(), "job", func(ctx context.Context) error {
		if h, ok, err := l.locker.Holder(ctx, "job"); h.Done || !ok || err != nil {
			t.Error(h, ok, err)
		}
		return write(ctx, 1)
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := l.locker.Do(t.Context(), "job", func(context.Context) error { return nil }); !errors.Is(err, redislock.ErrDone) {
		t.Error(err)
	}
	l.wantWritten(t, 1)
	if err := l.locker.ForceRelease(t.Context(), "job"); err != nil {
		t.Error(err)
	}
	l.wantFree(t, "job")
	var elsewhere int
	if err := admin.QueryRow(t.Context(), "SELECT count(*) FROM pg_tables WHERE tablename LIKE 'redislock%' AND schemaname <> 'jobs'").Scan(&elsewhere); err != nil || elsewhere != 0 {
		t.Errorf("%d tables elsewhere (%v)", elsewhere, err)
	}
}

// silent calls work under a row lock of TTL ttl over a network that has just gone silent.
func silent(t *testing.T, url string, ttl time.Duration, work func(ctx context.Context, p *proxy) error) error {
	t.Helper()
	p := newProxy(t, url)
	pool := connect(t, url, p.through)
	t.Cleanup(p.restore)
	var b books
	return locker(t, pool, &b, redislock.WithTTL(ttl)).Do(t.Context(), "n", func(ctx context.Context) error {
		p.hang()
		return work(ctx, p)
	})
}

func TestAnIdleHolderBehindASilentNetworkIsToldBeforeAnotherGetsTheLock(t *testing.T) {
	t.Parallel()
	url := database(t)
	var b books
	other := locker(t, connect(t, url), &b)
	err := silent(t, url, 3*time.Second, func(ctx context.Context, _ *proxy) error {
		eventually(t, "another holder", func(context.Context) bool {
			k, err := other.TryAcquire(t.Context(), "n")
			if err == nil {
				err = k.Release(t.Context())
			}
			return err == nil
		})
		lock, _ := redislock.FromContext(ctx)
		if err := lock.Check(t.Context()); !errors.Is(err, redislock.ErrLost) || !errors.Is(context.Cause(ctx), redislock.ErrLost) {
			t.Errorf("Check says %v, the context %v", err, context.Cause(ctx))
		}
		return nil
	})
	if !errors.Is(err, redislock.ErrLost) {
		t.Errorf("error is %v, want ErrLost", err)
	}
}

// askInVain has Check ask over the silent network, and returns when the question is under way.
func askInVain(t *testing.T, ctx context.Context) {
	t.Helper()
	lock, _ := redislock.FromContext(ctx)
	short, cancel := context.WithTimeout(ctx, time.Millisecond)
	defer cancel()
	if err := lock.Check(short); !errors.Is(err, redislock.ErrUnavailable) {
		t.Errorf("Check says %v, want ErrUnavailable", err)
	}
	tx, _ := Tx(ctx)
	eventually(t, "the question is under way", func(context.Context) bool { return tx.(*watchedTx).lease.turns.underWatch() != nil })
}

func TestAWatchdogThatGetsNoAnswerDoesNotHoldUpTheHandlersReturn(t *testing.T) {
	t.Parallel()
	failed := errors.New("failed")
	url, returned := database(t), make(chan error, 1)
	go func() {
		returned <- silent(t, url, time.Hour, func(ctx context.Context, _ *proxy) error {
			askInVain(t, ctx)
			return failed
		})
	}()
	select {
	case err := <-returned:
		if !errors.Is(err, failed) {
			t.Errorf("error is %v", err)
		}
	case <-time.After(time.Minute):
		t.Error("the handler has not returned")
	}
}

func TestAnImpatientCheckDoesNotEndTheLock(t *testing.T) {
	t.Parallel()
	err := silent(t, database(t), time.Hour, func(ctx context.Context, p *proxy) error {
		askInVain(t, ctx)
		p.restore()
		lock, _ := redislock.FromContext(ctx)
		return lock.Check(ctx)
	})
	if err != nil {
		t.Error(err)
	}
}

func TestATransactionThatIsNotTheLocksIsNotCommitted(t *testing.T) {
	for name, sql := range map[string]string{"chain": "COMMIT AND CHAIN", "rollback and chain": "ROLLBACK AND CHAIN", "anew": "ROLLBACK; BEGIN"} {
		t.Run(name, func(t *testing.T) {
			l := newLedger(t, redislock.WithDoneFor(time.Hour))
			err := l.locker.Do(t.Context(), "n", func(ctx context.Context) error {
				tx, _ := Tx(ctx)
				if _, err := tx.Exec(ctx, sql); err != nil {
					return err
				}
				return write(ctx, 1)
			})
			if err == nil || !strings.Contains(err.Error(), "another transaction") {
				t.Errorf("error is %v", err)
			}
			l.wantWritten(t)
			l.wantFree(t, "n")
		})
	}
}

func TestWhatAHandlerWroteStaysWhereALockWithinDropsItsTask(t *testing.T) {
	l := newLedger(t, redislock.WithKey(redislock.ByType), redislock.WithDoneFor(time.Hour))
	outer, inner := l.locker, locker(t, l.pool, &books{})
	task := asynq.NewTask("x", nil)
	name, err := inner.Name(t.Context(), task)
	if err != nil {
		t.Fatal(err)
	}
	k, err := l.other.TryAcquire(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	within := inner.Middleware(asynq.HandlerFunc(func(context.Context, *asynq.Task) error { return errors.New("it ran") }))
	err = outer.Middleware(asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
		if err := write(ctx, 1); err != nil {
			return err
		}
		return within.ProcessTask(ctx, task)
	})).ProcessTask(t.Context(), task)
	if err != nil {
		t.Error(err)
	}
	l.wantWritten(t, 1)
	outerName, err := outer.Name(t.Context(), task)
	if err != nil {
		t.Fatal(err)
	}
	l.wantFree(t, outerName)
	_ = k.Release(t.Context())
}

func TestAStandbyIsUnavailable(t *testing.T) {
	for _, code := range []string{"25006", "0A000"} {
		if err := failure("acquire lock", "k", &pgconn.PgError{Code: code}); !errors.Is(err, redislock.ErrUnavailable) {
			t.Errorf("%s: %v", code, err)
		}
	}
}

package pgfence

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"example.com/redislock"
	"example.com/redislock/internal/postgres"
)

// What a task costs under each kind of lock. The numbers of docs/choosing.md come from here:
//
//	go test -run '^$' -bench Task -benchtime 1s -count 10 .

// accounts is how many rows the tasks update in turn, each under the lock of its row.
const accounts = 1024

// kind is a way to run a task that updates one row.
type kind struct {
	name            string // as the page calls it
	redis, postgres int64  // round trips a task, as the page says
	start           func(testing.TB) job
}

// job is the work of the task with a number.
type job func(ctx context.Context, i int64) error

func kinds(tb testing.TB, r *rig) []kind {
	tb.Helper()
	quiet := redislock.WithLogger(slog.New(slog.DiscardHandler))
	done := redislock.Options(quiet, redislock.WithDoneFor(time.Hour))
	inRedis := func(opts ...redislock.Option) *redislock.Locker {
		l, err := redislock.New(r.rdb, opts...)
		return must(tb, l, err)
	}
	inPostgres := func(opts ...redislock.Option) *redislock.Locker {
		l, err := New(r.pool, opts...)
		return must(tb, l, err)
	}
	plain, plainDone := inRedis(quiet), inRedis(done)
	fencing := redislock.Options(quiet, redislock.WithFencing(), redislock.WithKeyPrefix("fenced:"))
	fenced := inRedis(fencing)
	row, rowDone := inPostgres(quiet), inPostgres(done)
	return []kind{
		{"no lock", 0, 3, func(testing.TB) job { return r.update }},
		{"plain lock", 2, 3, under(plain, byAccount, r.update)},
		{"WithDoneFor", 2, 3, under(plainDone, byOccasion, r.update)},
		{"fencing", 2, 5, under(fenced, byAccount, r.fencedUpdate)},
		{"row lock", 0, 4, under(row, byAccount, r.rowLockedUpdate)},
		{"row lock, WithDoneFor", 0, 4, under(rowDone, byOccasion, r.rowLockedUpdate)},
		{"copy: plain lock", 1, 0, copyOfHeld(plain, inRedis(quiet))},
		{"copy: WithDoneFor", 1, 0, copyOfDone(plainDone)},
		{"copy: fencing", 1, 0, copyOfHeld(fenced, inRedis(fencing))},
		{"copy: row lock", 0, 1, copyOfHeld(row, inPostgres(quiet))},
		{"copy: row lock, WithDoneFor", 0, 1, copyOfDone(rowDone)},
	}
}

func byAccount(i int64) string { return accountOf(i) }

// byOccasion is new with each task, as the name of work that is done once must be.
func byOccasion(i int64) string { return fmt.Sprintf("%s:%d", accountOf(i), i) }

func accountOf(i int64) string { return fmt.Sprintf("account:%d", i%accounts) }

func under(l *redislock.Locker, name func(int64) string, work job) func(testing.TB) job {
	return func(testing.TB) job {
		return func(ctx context.Context, i int64) error {
			return l.Do(ctx, name(i), func(ctx context.Context) error { return work(ctx, i) })
		}
	}
}

const updateAccount = "UPDATE accounts SET balance = balance + 1 WHERE id = $1"

func (r *rig) update(ctx context.Context, i int64) error {
	return pgx.BeginFunc(ctx, r.pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, updateAccount, i%accounts)
		return err
	})
}

func (r *rig) fencedUpdate(ctx context.Context, i int64) error {
	lock, _ := redislock.FromContext(ctx)
	fence, _ := lock.Fence()
	if err := Claim(ctx, r.pool, accountOf(i), fence); err != nil {
		return err
	}
	return pgx.BeginFunc(ctx, r.pool, func(tx pgx.Tx) error {
		if err := Guard(ctx, tx, accountOf(i), fence); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, updateAccount, i%accounts)
		return err
	})
}

func (r *rig) rowLockedUpdate(ctx context.Context, i int64) error {
	tx, _ := Tx(ctx)
	_, err := tx.Exec(ctx, updateAccount, i%accounts)
	return err
}

// copyOfHeld is a task that finds its lock taken, for as long as the test runs: an open transaction slows others down. The
// holder is another Locker, as in another process, since one knows its own locks.
func copyOfHeld(l, holder *redislock.Locker) func(testing.TB) job {
	return func(tb testing.TB) job {
		lock, err := holder.TryAcquire(tb.Context(), "held")
		must(tb, lock, err)
		tb.Cleanup(func() {
			if err := lock.Release(context.Background()); err != nil {
				tb.Error(err)
			}
		})
		return refused(l, "held", redislock.ErrHeld)
	}
}

// copyOfDone is a task that finds its work done.
func copyOfDone(l *redislock.Locker) func(testing.TB) job {
	return func(tb testing.TB) job {
		err := l.Do(tb.Context(), "done", func(context.Context) error { return nil })
		if err != nil && !errors.Is(err, redislock.ErrDone) { // from a run before
			tb.Fatal(err)
		}
		return refused(l, "done", redislock.ErrDone)
	}
}

func refused(l *redislock.Locker, name string, want error) job {
	return func(ctx context.Context, _ int64) error {
		err := l.Do(ctx, name, func(context.Context) error { return errors.New("it ran") })
		if !errors.Is(err, want) {
			return fmt.Errorf("want %w, got: %w", want, err)
		}
		return nil
	}
}

func TestRoundTripsAndPageAgree(t *testing.T) {
	r := newRig(t, database(t), 8)
	page := choosingPage(t)
	for _, k := range kinds(t, r) {
		t.Run(k.name, func(t *testing.T) {
			run := k.start(t)
			var inRedis, inPostgres []int64
			for i := range int64(60) {
				r.redis.trips.Store(0)
				r.postgres.trips.Store(0)
				if err := run(t.Context(), i); err != nil {
					t.Fatal(err)
				}
				inRedis = append(inRedis, r.redis.trips.Load())
				inPostgres = append(inPostgres, r.postgres.trips.Load())
			}
			// The median: the first tasks connect and prepare their statements, and one in 32 sweeps.
			if a, b := median(inRedis), median(inPostgres); a != k.redis || b != k.postgres {
				t.Errorf("round trips to Redis and PostgreSQL: %d and %d, want %d and %d\n%v\n%v", a, b, k.redis, k.postgres, inRedis, inPostgres)
			}
			if line := fmt.Sprintf("| %s | %d | %d |", k.name, k.redis, k.postgres); !strings.Contains(page, line) {
				t.Errorf("docs/choosing.md has no line that begins with %s", line)
			}
		})
	}
}

func TestPageHasTheSchema(t *testing.T) {
	if !strings.Contains(choosingPage(t), "```sql\n"+schema+"```\n") {
		t.Error("docs/choosing.md does not contain schema.sql word for word")
	}
}

// TestPageCodeCompiles: a reader copies code from docs/choosing.md, so each block of it stands in example_test.go, which compiles.
func TestPageCodeCompiles(t *testing.T) {
	source, err := os.ReadFile("example_test.go")
	here := unindented(string(must(t, source, err)))
	blocks := strings.Split(choosingPage(t), "\n```go\n")[1:]
	for i, block := range blocks {
		block, _, closed := strings.Cut(block, "\n```\n")
		if !closed || !strings.Contains(here, unindented(block)) {
			t.Errorf("block %d is not in example_test.go:\n%s", i+1, block)
		}
	}
	if len(blocks) < 3 {
		t.Errorf("found only %d blocks of Go in docs/choosing.md", len(blocks))
	}
}

func unindented(code string) string {
	lines := strings.Split(code, "\n")
	for i, line := range lines {
		lines[i] = strings.TrimSpace(line)
	}
	return "\n" + strings.Join(lines, "\n") + "\n"
}

func choosingPage(t *testing.T) string {
	t.Helper()
	page, err := os.ReadFile("../docs/choosing.md")
	return string(must(t, page, err))
}

func median(of []int64) int64 {
	slices.Sort(of)
	return of[len(of)/2]
}

func BenchmarkTask(b *testing.B) {
	server, err := postgres.Start("max_connections=100", "fsync=on")
	if errors.Is(err, postgres.ErrNotInstalled) {
		b.Skip("skipped: ", err)
	}
	must(b, server, err)
	defer func() {
		if err := server.Stop(); err != nil {
			b.Error(err)
		}
	}()
	for _, goroutines := range []int{1, 16} {
		b.Run(fmt.Sprintf("goroutines=%d", goroutines), func(b *testing.B) {
			r := newRig(b, server.URL("postgres"), goroutines+1) // one more, for the lock that copies find taken
			for _, k := range kinds(b, r) {
				b.Run(k.name, func(b *testing.B) { r.measure(b, k, goroutines) })
			}
		})
	}
}

// measure has a number of goroutines run tasks, each on a row of its own.
func (r *rig) measure(b *testing.B, k kind, goroutines int) {
	run, tasks := k.start(b), make(chan int64)
	var wg sync.WaitGroup
	for range goroutines {
		wg.Go(func() {
			for i := range tasks {
				if err := run(b.Context(), i); err != nil {
					b.Error(err)
				}
			}
		})
	}
	for range 4 * goroutines { // connect, and prepare statements
		tasks <- r.next.Add(1)
	}
	r.redis.trips.Store(0)
	r.postgres.trips.Store(0)
	began := time.Now()
	for b.Loop() {
		tasks <- r.next.Add(1)
	}
	close(tasks)
	wg.Wait()
	n := float64(b.N)
	b.ReportMetric(n/time.Since(began).Seconds(), "tasks/s")
	b.ReportMetric(float64(r.redis.trips.Load())/n, "redis-trips/task")
	b.ReportMetric(float64(r.postgres.trips.Load())/n, "pg-trips/task")
}

// rig is a Redis and a database whose round trips are counted.
type rig struct {
	redis, postgres meter
	rdb             *redis.Client
	pool            *pgxpool.Pool
	next            atomic.Int64 // task
}

// newRig returns a rig on the database at url, with new tables.
func newRig(tb testing.TB, url string, connections int) *rig {
	tb.Helper()
	r := &rig{}
	r.rdb = redis.NewClient(&redis.Options{Addr: startRedis(tb), Dialer: r.redis.dial, PoolSize: connections})
	tb.Cleanup(func() { _ = r.rdb.Close() })
	config, err := pgxpool.ParseConfig(url)
	must(tb, config, err)
	config.MaxConns = int32(connections)
	config.ConnConfig.DialFunc = r.postgres.dial
	r.pool, err = pgxpool.NewWithConfig(tb.Context(), config)
	must(tb, r.pool, err)
	tb.Cleanup(r.pool.Close)
	_, err = r.pool.Exec(tb.Context(), `DROP TABLE IF EXISTS accounts, redislock_fences, redislock_locks, redislock_holders;
CREATE TABLE accounts (id bigint PRIMARY KEY, balance bigint NOT NULL);
INSERT INTO accounts SELECT i, 0 FROM generate_series(0, `+strconv.Itoa(accounts-1)+`) i`)
	must(tb, r, err)
	must(tb, r, Migrate(tb.Context(), r.pool))
	return r
}

// startRedis starts a redis-server without persistence, which ends with the test, and returns its address.
func startRedis(tb testing.TB) string {
	tb.Helper()
	program, err := exec.LookPath("redis-server")
	if err != nil && os.Getenv("REDISLOCK_REQUIRE_SERVERS") == "" {
		tb.Skip("skipped: no redis-server in PATH")
	}
	must(tb, program, err)
	free, err := net.Listen("tcp", "127.0.0.1:0")
	must(tb, free, err)
	_, port, err := net.SplitHostPort(free.Addr().String())
	must(tb, port, errors.Join(err, free.Close()))
	cmd := exec.Command(program, "--bind", "127.0.0.1", "--port", port, "--save", "", "--dir", tb.TempDir())
	must(tb, cmd, cmd.Start())
	exited := make(chan error, 1)
	go func() { exited <- cmd.Wait() }()
	tb.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-exited
	})
	probe := redis.NewClient(&redis.Options{Addr: "127.0.0.1:" + port})
	defer probe.Close()
	for end := time.Now().Add(20 * time.Second); probe.Ping(tb.Context()).Err() != nil; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			tb.Fatal("redis-server does not answer")
		}
	}
	return "127.0.0.1:" + port
}

func must[T any](tb testing.TB, v T, err error) T {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
	return v
}

// meter counts round trips: each time something is read after something was written.
type meter struct{ trips atomic.Int64 }

func (m *meter) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	return &meteredConn{Conn: conn, meter: m}, nil
}

type meteredConn struct {
	net.Conn
	meter *meter
	wrote atomic.Bool
}

func (c *meteredConn) Write(p []byte) (int, error) {
	c.wrote.Store(true)
	return c.Conn.Write(p)
}

func (c *meteredConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 && c.wrote.CompareAndSwap(true, false) {
		c.meter.trips.Add(1)
	}
	return n, err
}

func TestAJumpBackOfTheDatabasesClockBlocksNoName(t *testing.T) {
	pool := connect(t, database(t))
	l, err := New(pool)
	must(t, l, err)
	work := func(context.Context) error { return nil }
	must(t, l, l.Do(t.Context(), "n", work))
	_, err = pool.Exec(t.Context(), "UPDATE redislock_locks SET expires = expires + interval '1 hour'") // as it looks after the jump
	must(t, l, err)
	if err := l.Do(t.Context(), "n", work); err != nil {
		t.Errorf("nobody has the lock and nothing is done, yet: %v", err)
	}
}

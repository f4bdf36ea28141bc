package pgfence

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"example.com/redislock"
)

// bank is a database with our tables and with one for holders to write to. Account 7 is there, and empty.
func bank(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool := connect(t, database(t))
	openBank(t, pool)
	return pool
}

func openBank(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	execute(t, pool, "CREATE TABLE accounts (id int PRIMARY KEY, balance text NOT NULL DEFAULT '')")
	execute(t, pool, "INSERT INTO accounts VALUES (7)")
}

func execute(t *testing.T, db DB, sql string, args ...any) {
	t.Helper()
	if _, err := db.Exec(t.Context(), sql, args...); err != nil {
		t.Fatal(err)
	}
}

// pay is a fenced write to account 7, as the package's documentation shows it.
func pay(ctx context.Context, pool *pgxpool.Pool, fence int64, balance string) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if err := Guard(ctx, tx, "account:7", fence); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, "UPDATE accounts SET balance = $1 WHERE id = 7", balance)
		return err
	})
}

// guard is Guard in a transaction of its own.
func guard(ctx context.Context, pool *pgxpool.Pool, resource string, fence int64) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return Guard(ctx, tx, resource, fence) })
}

// begin starts a transaction that does not outlive the test.
func begin(t *testing.T, pool *pgxpool.Pool) pgx.Tx {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	noError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

// noError ends the test with an error that nobody wants.
func noError(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// wantNumber checks what number a resource has, 0 for none.
func wantNumber(t *testing.T, pool *pgxpool.Pool, resource string, want int64) {
	t.Helper()
	var is int64
	err := pool.QueryRow(t.Context(), "SELECT coalesce(max(fence), 0) FROM redislock_fences WHERE resource = $1", resource).Scan(&is)
	if err != nil || is != want {
		t.Errorf("the number of %s is %d, %v, want %d", resource, is, err, want)
	}
}

// wantBalance checks what is in account 7.
func wantBalance(t *testing.T, pool *pgxpool.Pool, want string) {
	t.Helper()
	var is string
	if err := pool.QueryRow(t.Context(), "SELECT balance FROM accounts WHERE id = 7").Scan(&is); err != nil || is != want {
		t.Errorf("the balance is %q, %v, want %q", is, err, want)
	}
}

func code(err error) string {
	var refusal *pgconn.PgError
	if errors.As(err, &refusal) {
		return refusal.Code
	}
	return ""
}

// waiters counts the sessions of a database that wait for another one's lock.
func waiters(ctx context.Context, pool *pgxpool.Pool) (n int) {
	err := pool.QueryRow(ctx, `SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0`).Scan(&n)
	if err != nil {
		return -1
	}
	return n
}

func TestANumberOnlyGrows(t *testing.T) {
	pool := bank(t)
	claim := func(ctx context.Context, pool *pgxpool.Pool, resource string, fence int64) error {
		return Claim(ctx, pool, resource, fence)
	}
	type move = func(context.Context, *pgxpool.Pool, string, int64) error
	for _, c := range []struct {
		name    string
		before  int64 // 0 for none
		move    move
		fence   int64
		refused bool
	}{
		{"claim of what nobody claimed", 0, claim, 1, false},
		{"claim with an equal number", 5, claim, 5, true},
		{"claim with a lower number", 5, claim, 4, true},
		{"claim with a higher number", 5, claim, 6, false},
		{"claim with a much higher number", 5, claim, 1_700_000_000_000_000, false},
		{"claim with the largest number", 5, claim, math.MaxInt64, false},
		{"claim of the largest number", math.MaxInt64, claim, math.MaxInt64, true},
		{"claim below the largest number", math.MaxInt64, claim, math.MaxInt64 - 1, true},
		{"guard of what nobody claimed", 0, guard, 1, false},
		{"guard with a lower number", 5, guard, 4, true},
		{"guard with its own number", 5, guard, 5, false},
		{"guard with a higher number", 5, guard, 6, false},
		{"guard with the largest number", 5, guard, math.MaxInt64, false},
		{"guard of the largest number", math.MaxInt64, guard, math.MaxInt64, false},
		{"guard below the largest number", math.MaxInt64, guard, math.MaxInt64 - 1, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.before > 0 {
				noError(t, Claim(t.Context(), pool, c.name, c.before))
			}
			err := c.move(t.Context(), pool, c.name, c.fence)
			after := c.fence
			if c.refused {
				after = c.before
				if !errors.Is(err, ErrStale) || !strings.Contains(err.Error(), c.name) || !strings.Contains(err.Error(), fmt.Sprint(c.fence)) {
					t.Errorf("error is %v, want ErrStale with resource and fence", err)
				}
			} else if err != nil {
				t.Error(err)
			}
			wantNumber(t, pool, c.name, after)
		})
	}
}

func TestAHolderWritesAsOftenAsItLikes(t *testing.T) {
	pool := bank(t)
	noError(t, Claim(t.Context(), pool, "account:7", 5))
	for i := range 3 {
		noError(t, pay(t.Context(), pool, 5, fmt.Sprint(i)))
		wantBalance(t, pool, fmt.Sprint(i))
	}
	noError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		return errors.Join(Guard(t.Context(), tx, "account:7", 5), Guard(t.Context(), tx, "account:7", 5))
	}))
	wantNumber(t, pool, "account:7", 5)
}

func TestTwoResourcesDoNotTouchEachOther(t *testing.T) {
	pool := bank(t)
	noError(t, Claim(t.Context(), pool, "account:7", 9))
	noError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		return errors.Join(
			Guard(ctx, tx, "account:7", 9),
			Claim(ctx, pool, "account:8", 1), // which doesn't wait for the transaction
			guard(ctx, pool, "account:8", 2),
		)
	}))
	wantNumber(t, pool, "account:7", 9)
	wantNumber(t, pool, "account:8", 2)
}

func TestClaimTakesAPoolAConnectionAndATransaction(t *testing.T) {
	pool := bank(t)
	conn, err := pool.Acquire(t.Context())
	noError(t, err)
	defer conn.Release()
	noError(t, Claim(t.Context(), pool, "account:7", 1))
	noError(t, Claim(t.Context(), conn.Conn(), "account:7", 2))
	noError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return Claim(t.Context(), tx, "account:7", 3) }))
	wantNumber(t, pool, "account:7", 3)
}

func TestBadInputIsNamedAndNothingIsWritten(t *testing.T) {
	pool := bank(t)
	const range1000, range1 = "1 to 1000 bytes of UTF-8 without NUL", "want 1 or more"
	for _, c := range []struct {
		name, resource string
		fence          int64
		want           []string
	}{
		{"empty resource", "", 1, []string{`""`, range1000}},
		{"resource too long", strings.Repeat("x", 1001), 1, []string{"xxx", range1000}},
		{"resource too long in bytes", strings.Repeat("é", 501), 1, []string{range1000}},
		{"resource of invalid UTF-8", "account:\xff", 1, []string{`"account:\xff"`, range1000}},
		{"resource with a NUL", "account:\x00", 1, []string{`"account:\x00"`, range1000}},
		{"fence 0", "account:7", 0, []string{"account:7", "fence 0", range1}},
		{"fence below 0", "account:7", -1, []string{"account:7", "fence -1", range1}},
		{"the lowest fence", "account:7", math.MinInt64, []string{"account:7", fmt.Sprint(int64(math.MinInt64)), range1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			for verb, err := range map[string]error{
				"claim": Claim(t.Context(), pool, c.resource, c.fence),
				"guard": guard(t.Context(), pool, c.resource, c.fence),
			} {
				for _, part := range append(c.want, "pgfence: "+verb) {
					if err == nil || !strings.Contains(err.Error(), part) {
						t.Errorf("error of %s is %v, want %q in it", verb, err, part)
					}
				}
				if errors.Is(err, ErrStale) {
					t.Errorf("%s says that the fence is stale", verb)
				}
			}
			var rows int
			if err := pool.QueryRow(t.Context(), "SELECT count(*) FROM redislock_fences").Scan(&rows); err != nil || rows != 0 {
				t.Errorf("%d rows are written, %v", rows, err)
			}
		})
	}
}

func TestTheLongestResourceIsTaken(t *testing.T) {
	pool := bank(t)
	for _, resource := range []string{strings.Repeat("x", 1000), strings.Repeat("é", 500)} {
		noError(t, Claim(t.Context(), pool, resource, 1))
		noError(t, guard(t.Context(), pool, resource, 1))
		wantNumber(t, pool, resource, 1)
	}
}

func TestNilIsNamed(t *testing.T) {
	for _, c := range []struct {
		name, want string
		call       func(context.Context) error
	}{
		{"pool of Migrate", "pgfence: migrate: the pool is nil", func(ctx context.Context) error { return Migrate(ctx, nil) }},
		{"database of Claim", "pgfence: claim: the database is nil", func(ctx context.Context) error { return Claim(ctx, nil, "r", 1) }},
		{"pool of Claim", "pgfence: claim: the database is nil", func(ctx context.Context) error { return Claim(ctx, (*pgxpool.Pool)(nil), "r", 1) }},
		{"connection of Claim", "pgfence: claim: the database is nil", func(ctx context.Context) error { return Claim(ctx, (*pgx.Conn)(nil), "r", 1) }},
		{"transaction of Guard", "pgfence: guard: the transaction is nil", func(ctx context.Context) error { return Guard(ctx, nil, "r", 1) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			defer func() {
				if p := recover(); p != nil {
					t.Errorf("it panics: %v", p)
				}
			}()
			if err := c.call(t.Context()); err == nil || err.Error() != c.want {
				t.Errorf("error is %v, want %s", err, c.want)
			}
		})
	}
}

func TestANewerClaimWaitsForAGuardedTransaction(t *testing.T) {
	pool := bank(t)
	for _, c := range []struct {
		name string
		end  func(pgx.Tx, context.Context) error
		want string
	}{
		{"commit", pgx.Tx.Commit, "written"},
		{"rollback", pgx.Tx.Rollback, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			resource := c.name
			execute(t, pool, "UPDATE accounts SET balance = ''")
			tx := begin(t, pool)
			noError(t, Guard(t.Context(), tx, resource, 1))
			claimed := make(chan error, 1)
			go func() { claimed <- Claim(t.Context(), pool, resource, 2) }()
			eventually(t, "the claim waits", func(ctx context.Context) bool { return waiters(ctx, pool) == 1 })
			execute(t, tx, "UPDATE accounts SET balance = 'written'")
			noError(t, c.end(tx, t.Context()))
			noError(t, <-claimed)
			wantNumber(t, pool, resource, 2)
			wantBalance(t, pool, c.want)
			if err := guard(t.Context(), pool, resource, 1); !errors.Is(err, ErrStale) {
				t.Errorf("error of the older holder is %v, want ErrStale", err)
			}
		})
	}
}

func TestAClaimThatGivesUpLeavesNothingBehind(t *testing.T) {
	pool := bank(t)
	tx := begin(t, pool)
	noError(t, Guard(t.Context(), tx, "account:7", 1))
	ctx, cancel := context.WithCancel(t.Context())
	claimed := make(chan error, 1)
	go func() { claimed <- Claim(ctx, pool, "account:7", 2) }()
	eventually(t, "the claim waits", func(ctx context.Context) bool { return waiters(ctx, pool) == 1 })
	cancel()
	if err := <-claimed; !errors.Is(err, context.Canceled) || errors.Is(err, ErrStale) || !strings.Contains(err.Error(), "account:7 with fence 2") {
		t.Errorf("error is %v, want context.Canceled with resource and fence", err)
	}
	eventually(t, "nobody waits", func(ctx context.Context) bool { return waiters(ctx, pool) == 0 })
	noError(t, tx.Commit(t.Context()))
	wantNumber(t, pool, "account:7", 1)
	noError(t, Claim(t.Context(), pool, "account:7", 2))
}

func TestALockTimeoutBoundsClaimAndGuard(t *testing.T) {
	pool := bank(t)
	tx := begin(t, pool)
	noError(t, Guard(t.Context(), tx, "account:7", 1))
	hasty := connect(t, pool.Config().ConnString(), func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["lock_timeout"] = "50" })
	for verb, err := range map[string]error{
		"claim": Claim(t.Context(), hasty, "account:7", 2),
		"guard": pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			execute(t, tx, "SET LOCAL lock_timeout = 50")
			return Guard(t.Context(), tx, "account:7", 2)
		}),
	} {
		if code(err) != "55P03" || errors.Is(err, ErrStale) {
			t.Errorf("error of %s is %v, want SQLSTATE 55P03", verb, err)
		}
	}
	noError(t, tx.Commit(t.Context()))
	wantNumber(t, pool, "account:7", 1)
}

// oneStatement stands in doc.go.
const oneStatement = `
WITH guard AS (
  INSERT INTO redislock_fences AS f (resource, fence) VALUES ('account:7', $1)
  ON CONFLICT (resource) DO UPDATE SET fence = excluded.fence WHERE f.fence <= excluded.fence
  RETURNING fence
)
UPDATE accounts SET balance = $2 WHERE id = 7 AND EXISTS (SELECT FROM guard)`

func TestTheOneStatementIsTheDocumentedOne(t *testing.T) {
	text, err := os.ReadFile("doc.go")
	noError(t, err)
	plain := strings.Join(strings.Fields(strings.ReplaceAll(string(text), "\n//", "\n")), " ")
	if !strings.Contains(plain, strings.Join(strings.Fields(oneStatement), " ")) {
		t.Error("doc.go shows another statement")
	}
}

func TestTheOneStatementRefusesAStaleNumber(t *testing.T) {
	pool := bank(t)
	for _, c := range []struct {
		name                 string
		fence, rows, is      int64
		balance, wantBalance string
	}{
		{"fresh", 5, 1, 5, "fresh", "fresh"},
		{"equal", 5, 1, 5, "equal", "equal"},
		{"stale", 4, 0, 5, "stale", "equal"},
		{"higher", 6, 1, 6, "higher", "higher"},
		{"largest", math.MaxInt64, 1, math.MaxInt64, "largest", "largest"},
	} {
		tag, err := pool.Exec(t.Context(), oneStatement, c.fence, c.balance)
		if err != nil || tag.RowsAffected() != c.rows {
			t.Errorf("%s: %d rows, %v, want %d", c.name, tag.RowsAffected(), err, c.rows)
		}
		wantNumber(t, pool, "account:7", c.is)
		wantBalance(t, pool, c.wantBalance)
	}
}

func TestTwoSessionsRunTheOneStatement(t *testing.T) {
	pool := bank(t)
	for _, c := range []struct {
		name          string
		before        int64 // 0 for none
		first, second int64
		end           func(pgx.Tx, context.Context) error
		rows, is      int64 // of the second
		balance       string
	}{
		{"the newer one second", 1, 1, 2, pgx.Tx.Commit, 1, 2, "second"},
		{"the newer one second, on a resource nobody claimed", 0, 1, 2, pgx.Tx.Commit, 1, 2, "second"},
		{"the newer one second, after a rollback", 1, 1, 2, pgx.Tx.Rollback, 1, 2, "second"},
		{"the newer one first", 1, 2, 1, pgx.Tx.Commit, 0, 2, "first"},
		{"the newer one first, on a resource nobody claimed", 0, 2, 1, pgx.Tx.Commit, 0, 2, "first"},
		{"the newer one first, and rolled back", 1, 2, 1, pgx.Tx.Rollback, 1, 1, "second"},
		{"the newer one first, and rolled back, on a resource nobody claimed", 0, 2, 1, pgx.Tx.Rollback, 1, 1, "second"},
	} {
		t.Run(c.name, func(t *testing.T) {
			execute(t, pool, "DELETE FROM redislock_fences")
			if c.before > 0 {
				noError(t, Claim(t.Context(), pool, "account:7", c.before))
			}
			tx := begin(t, pool)
			execute(t, tx, oneStatement, c.first, "first")
			rows, failed := make(chan int64, 1), make(chan error, 1)
			go func() {
				tag, err := pool.Exec(t.Context(), oneStatement, c.second, "second")
				rows <- tag.RowsAffected()
				failed <- err
			}()
			eventually(t, "the second waits", func(ctx context.Context) bool { return waiters(ctx, pool) == 1 })
			noError(t, c.end(tx, t.Context()))
			if is, err := <-rows, <-failed; err != nil || is != c.rows {
				t.Errorf("the second changed %d rows, %v, want %d", is, err, c.rows)
			}
			wantNumber(t, pool, "account:7", c.is)
			wantBalance(t, pool, c.balance)
		})
	}
}

func TestMigrateTwiceKeepsTheRows(t *testing.T) {
	pool := bank(t) // which has run it
	noError(t, Claim(t.Context(), pool, "account:7", 5))
	execute(t, pool, "INSERT INTO redislock_locks (key, value, expires) VALUES ('k', 'v', now() + interval '1 hour')")
	execute(t, pool, "INSERT INTO redislock_holders VALUES (1, 'k', 'v')")
	migrate(t, pool)
	wantNumber(t, pool, "account:7", 5)
	var rows int
	if err := pool.QueryRow(t.Context(), "SELECT count(*) FROM redislock_locks, redislock_holders").Scan(&rows); err != nil || rows != 1 {
		t.Errorf("%d rows are left, %v", rows, err)
	}
}

func TestTenHostsMigrateAtOnce(t *testing.T) {
	url := emptyDatabase(t)
	start, failed := make(chan struct{}), make(chan error)
	hosts := make([]*pgxpool.Pool, 10)
	for i := range hosts {
		hosts[i] = connect(t, url)
		noError(t, hosts[i].Ping(t.Context())) // so that each has a connection when it starts
	}
	for _, host := range hosts {
		go func() {
			<-start
			failed <- Migrate(t.Context(), host)
		}()
	}
	close(start)
	for range hosts {
		if err := <-failed; err != nil {
			t.Error(err)
		}
	}
	noError(t, Claim(t.Context(), hosts[0], "account:7", 1))
}

func TestMigrateGoesByTheSearchPath(t *testing.T) {
	url := emptyDatabase(t)
	plain := connect(t, url)
	execute(t, plain, "CREATE SCHEMA locks")
	pool := connect(t, url, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["search_path"] = "locks,public" })
	migrate(t, pool)
	noError(t, Claim(t.Context(), pool, "account:7", 1))
	var places []string
	err := plain.QueryRow(t.Context(), "SELECT array_agg(schemaname || '.' || tablename ORDER BY tablename) FROM pg_tables WHERE tablename LIKE 'redislock%'").Scan(&places)
	if want := []string{"locks.redislock_fences", "locks.redislock_holders", "locks.redislock_locks"}; err != nil || !slices.Equal(places, want) {
		t.Errorf("the tables are %v, %v, want %v", places, err, want)
	}
}

func TestWithoutMigrateTheErrorNamesIt(t *testing.T) {
	pool := connect(t, emptyDatabase(t))
	for verb, err := range map[string]error{
		"claim": Claim(t.Context(), pool, "account:7", 1),
		"guard": guard(t.Context(), pool, "account:7", 1),
	} {
		if code(err) != "42P01" || !strings.Contains(err.Error(), "pgfence.Migrate") {
			t.Errorf("error of %s is %v, want SQLSTATE 42P01 and a word about Migrate", verb, err)
		}
	}
}

func TestMigrateSaysWhatFailed(t *testing.T) {
	pool := bank(t)
	pool.Close()
	if err := Migrate(t.Context(), pool); err == nil || !strings.HasPrefix(err.Error(), "pgfence: migrate: ") {
		t.Errorf("error is %v", err)
	}
}

// A holder that ends between its write and its commit takes both its write and its number along.
func TestACrashBeforeTheCommitLeavesNumberAndWriteAsTheyWere(t *testing.T) {
	server := ownServer(t)
	pool := connect(t, server.URL("postgres"))
	migrate(t, pool)
	openBank(t, pool)
	fence := int64(1)
	for _, c := range []struct {
		name  string
		crash func(t *testing.T, holder *pgx.Conn)
	}{
		{"session ended", func(t *testing.T, holder *pgx.Conn) {
			execute(t, pool, "SELECT pg_terminate_backend($1)", holder.PgConn().PID())
		}},
		{"connection broken", func(t *testing.T, holder *pgx.Conn) { noError(t, holder.PgConn().Conn().Close()) }},
		{"server crashed", func(t *testing.T, _ *pgx.Conn) {
			server.Crash()
			noError(t, server.Restart())
			eventually(t, "the server answers", func(ctx context.Context) bool { return pool.Ping(ctx) == nil })
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			before, lost, next := fence, fence+1, fence+2
			fence += 3
			noError(t, Claim(t.Context(), pool, "account:7", before))
			noError(t, pay(t.Context(), pool, before, "before"))
			holder, err := pgx.Connect(t.Context(), pool.Config().ConnString())
			noError(t, err)
			defer func() { _ = holder.Close(t.Context()) }()
			tx, err := holder.Begin(t.Context())
			noError(t, err)
			noError(t, Guard(t.Context(), tx, "account:7", lost))
			execute(t, tx, "UPDATE accounts SET balance = 'lost' WHERE id = 7")

			c.crash(t, holder)
			if err := tx.Commit(t.Context()); err == nil {
				t.Error("the commit succeeded")
			}
			wantNumber(t, pool, "account:7", before)
			wantBalance(t, pool, "before")
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			noError(t, Claim(ctx, pool, "account:7", next))
			noError(t, pay(ctx, pool, next, "after"))
			wantNumber(t, pool, "account:7", next)
			wantBalance(t, pool, "after")
		})
	}
}

// holder is one side of a merge.
type holder struct {
	name   string
	fence  int64
	conn   *pgx.Conn
	tx     pgx.Tx
	level  pgx.TxIsoLevel
	queue  []string // steps that wait for the one that waits for the other's lock
	busy   string   // the step it is at
	done   chan error
	failed error
}

// pid is the server's process that serves the holder.
func (h *holder) pid() uint32 { return h.conn.PgConn().PID() }

// do is one statement of a holder. Its first error is also the end of its transaction.
func (h *holder) do(ctx context.Context, step string, account int) (err error) {
	defer func() {
		if err != nil && h.tx != nil {
			_ = h.tx.Rollback(ctx)
		}
	}()
	resource := fmt.Sprintf("account:%d", account)
	switch step {
	case "claim":
		return Claim(ctx, h.conn, resource, h.fence)
	case "begin": // and read, which is when repeatable read takes its snapshot
		if h.tx, err = h.conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: h.level}); err == nil {
			_, err = h.tx.Exec(ctx, "SELECT balance FROM accounts WHERE id = $1", account)
		}
		return err
	case "guard":
		return Guard(ctx, h.tx, resource, h.fence)
	case "write":
		_, err = h.tx.Exec(ctx, "UPDATE accounts SET balance = balance || $2 WHERE id = $1", account, h.name)
		return err
	default: // "commit"
		return h.tx.Commit(ctx)
	}
}

// event is a step that has come to its end.
type event struct {
	who, step string
	err       error
}

// merge runs the steps of two holders in one order, each to its end or until it waits for the other one.
type merge struct {
	watch   *pgxpool.Pool
	account int
	a, b    *holder
	log     []event
	waited  bool
}

// run takes an order such as "ABBA…", and what each of the two has to do.
func (m *merge) run(ctx context.Context, order string, a, b []string) error {
	for _, who := range order {
		h, other, script := m.a, m.b, &a
		if who == 'B' {
			h, other, script = m.b, m.a, &b
		}
		h.queue, *script = append(h.queue, (*script)[0]), (*script)[1:]
		// In this order, since the other one can only go on because of this one's step.
		if err := errors.Join(m.settle(ctx, h, other), m.settle(ctx, other, h)); err != nil {
			return err
		}
	}
	if m.a.busy != "" || m.b.busy != "" {
		return errors.New("somebody still waits at the end")
	}
	return nil
}

// settle lets a holder go on until it has done all that it has to, has failed, or waits for the other one.
func (m *merge) settle(ctx context.Context, h, other *holder) error {
	for {
		if h.busy == "" {
			if h.failed != nil || len(h.queue) == 0 {
				return nil
			}
			h.busy, h.queue = h.queue[0], h.queue[1:]
			go func(step string) { h.done <- h.do(ctx, step, m.account) }(h.busy)
		}
		select {
		case h.failed = <-h.done:
			m.log = append(m.log, event{h.name, h.busy, h.failed})
			h.busy = ""
		case <-time.After(time.Millisecond):
			var waits bool
			err := m.watch.QueryRow(ctx, "SELECT $2 = ANY (pg_blocking_pids($1))", h.pid(), other.pid()).Scan(&waits)
			if err != nil || waits {
				m.waited = m.waited || waits
				return err
			}
		}
	}
}

// done counts the steps of a holder that succeeded, and says where the last of them is in the log, -1 for nowhere.
func (m *merge) done(who string, steps ...string) (n, last int) {
	last = -1
	for i, e := range m.log {
		if e.who == who && slices.Contains(steps, e.step) && e.err == nil {
			n, last = n+1, i
		}
	}
	return n, last
}

// check returns what is wrong with how a merge came out.
func (m *merge) check(ctx context.Context, bothSucceed bool) (wrong []string) {
	is := func(bad bool, format string, args ...any) {
		if bad {
			wrong = append(wrong, fmt.Sprintf(format, args...))
		}
	}
	overtaken := slices.IndexFunc(m.log, func(e event) bool {
		return e.who == "B" && (e.step == "claim" || e.step == "commit") && e.err == nil
	})
	commitsA, lastA := m.done("A", "commit")
	commitsB, _ := m.done("B", "commit")
	is(overtaken >= 0 && lastA > overtaken, "A has committed after B")
	serializing := m.a.level != pgx.ReadCommitted
	is(m.a.failed != nil && !errors.Is(m.a.failed, ErrStale) && !(serializing && code(m.a.failed) == "40001"), "A was refused for another reason")
	refusedA := slices.IndexFunc(m.log, func(e event) bool { return e.who == "A" && e.err != nil })
	is(refusedA >= 0 && (overtaken < 0 || refusedA < overtaken), "A was refused without a reason")
	is(m.b.failed != nil && (bothSucceed || code(m.b.failed) != "40001" || commitsA == 0), "B was refused")

	var balance string
	var number int64
	err := m.watch.QueryRow(ctx, "SELECT balance, fence FROM accounts, redislock_fences WHERE id = $1 AND resource = 'account:' || id", m.account).
		Scan(&balance, &number)
	want := int64(1)
	if overtaken >= 0 {
		want = 2
	}
	is(err != nil || number != want, "the number is %d, %v, want %d", number, err, want)
	is(balance != strings.Repeat("A", commitsA)+strings.Repeat("B", commitsB), "%d commits of A and %d of B made %q", commitsA, commitsB, balance)
	return wrong
}

// merges returns every order of a steps of A and b steps of B.
func merges(a, b int) (all []string) {
	if a == 0 || b == 0 {
		return []string{strings.Repeat("A", a) + strings.Repeat("B", b)}
	}
	for _, rest := range merges(a-1, b) {
		all = append(all, "A"+rest)
	}
	for _, rest := range merges(a, b-1) {
		all = append(all, "B"+rest)
	}
	return all
}

// A has number 1, B number 2. No order of their statements lets A commit a write once B has claimed or written.
func TestEveryMergeOfTwoHoldersKeepsTheOlderOneOut(t *testing.T) {
	unclaimed := []string{"begin", "guard", "write", "commit"}
	claimed := append([]string{"claim"}, unclaimed...)
	twice := append(slices.Clone(unclaimed), unclaimed...)
	for _, c := range []struct {
		name  string
		level pgx.TxIsoLevel
		a, b  []string
		count int
	}{
		{"read committed", pgx.ReadCommitted, claimed, claimed, 252},
		{"read committed, without a claim", pgx.ReadCommitted, unclaimed, unclaimed, 70},
		{"read committed, the newer one claims only", pgx.ReadCommitted, claimed, []string{"claim"}, 6},
		{"read committed, the older one writes twice", pgx.ReadCommitted, twice, unclaimed, 495},
		{"repeatable read", pgx.RepeatableRead, claimed, claimed, 252},
		{"repeatable read, without a claim", pgx.RepeatableRead, unclaimed, unclaimed, 70},
		{"serializable", pgx.Serializable, claimed, claimed, 252},
		{"serializable, without a claim", pgx.Serializable, unclaimed, unclaimed, 70},
	} {
		t.Run(c.name, func(t *testing.T) {
			orders := merges(len(c.a), len(c.b))
			if len(orders) != c.count {
				t.Fatalf("%d merges, want %d", len(orders), c.count)
			}
			pool := bank(t)
			execute(t, pool, "INSERT INTO accounts SELECT generate_series(1001, 1000 + $1::int)", c.count)
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			conns := make([]*pgx.Conn, 2)
			for i := range conns {
				conn, err := pool.Acquire(ctx)
				noError(t, err)
				defer conn.Release()
				conns[i] = conn.Conn()
			}
			var waited, refused, both int
			// Under a claim, or at read committed, nothing keeps B from its end.
			bothSucceed := c.level == pgx.ReadCommitted || c.b[0] == "claim"
			for i, order := range orders {
				m := &merge{
					watch: pool, account: 1001 + i,
					a: &holder{name: "A", fence: 1, conn: conns[0], level: c.level, done: make(chan error, 1)},
					b: &holder{name: "B", fence: 2, conn: conns[1], level: c.level, done: make(chan error, 1)},
				}
				if err := m.run(ctx, order, c.a, c.b); err != nil {
					t.Fatalf("%s: %v: %v", order, err, m.log)
				}
				if wrong := m.check(ctx, bothSucceed); len(wrong) > 0 {
					t.Errorf("%s: %s: %v", order, strings.Join(wrong, ", "), m.log)
				}
				waited += count(m.waited)
				refused += count(m.a.failed != nil)
				both += count(m.a.failed == nil && m.b.failed == nil)
			}
			t.Logf("%d merges: one waits for the other in %d, the older one is refused in %d, both succeed in %d", c.count, waited, refused, both)
			if waited == 0 || refused == 0 || both == 0 {
				t.Error("a kind of outcome never came up")
			}
		})
	}
}

func count(is bool) int {
	if is {
		return 1
	}
	return 0
}

// The lock of a holder is gone, and it does not know yet.
func TestAHolderThatHasLostItsLockCanNotWrite(t *testing.T) {
	for name, lose := range map[string]func(*miniredis.Miniredis, *redislock.Lock){
		"TTL over":       func(m *miniredis.Miniredis, _ *redislock.Lock) { m.FastForward(2 * time.Second) },
		"key deleted":    func(m *miniredis.Miniredis, k *redislock.Lock) { m.Del(k.Key()) },
		"Redis is empty": func(m *miniredis.Miniredis, _ *redislock.Lock) { m.FlushAll() },
	} {
		t.Run(name, func(t *testing.T) {
			pool, mini := bank(t), miniredis.RunT(t)
			first := fencedLock(t, mini.Addr())
			older, _ := first.Fence()
			noError(t, Claim(t.Context(), pool, "account:7", older))
			noError(t, pay(t.Context(), pool, older, "first"))
			lose(mini, first)

			newer, _ := fencedLock(t, mini.Addr()).Fence()
			noError(t, Claim(t.Context(), pool, "account:7", newer))
			if err := pay(t.Context(), pool, older, "late"); !errors.Is(err, ErrStale) {
				t.Errorf("after the claim, error is %v, want ErrStale", err)
			}
			noError(t, pay(t.Context(), pool, newer, "second"))
			if err := pay(t.Context(), pool, older, "late"); !errors.Is(err, ErrStale) {
				t.Errorf("after the write, error is %v, want ErrStale", err)
			}
			wantBalance(t, pool, "second")
			wantNumber(t, pool, "account:7", newer)
		})
	}
}

// fenced is how holders of account 7 are locked: for a second at a time, with a number.
var fenced = redislock.Options(redislock.WithFencing(), redislock.WithTTL(time.Second), redislock.WithLogger(slog.New(slog.DiscardHandler)))

// fencedLock takes the lock of account 7 as a host of its own, as soon as it is free.
func fencedLock(t *testing.T, redisAddr string) (lock *redislock.Lock) {
	t.Helper()
	rdb := redis.NewClient(&redis.Options{Addr: redisAddr})
	l, err := redislock.New(rdb, fenced)
	noError(t, err)
	eventually(t, "the lock is free", func(ctx context.Context) bool {
		lock, err = l.TryAcquire(ctx, "account:7")
		return !errors.Is(err, redislock.ErrHeld)
	})
	noError(t, err)
	t.Cleanup(func() {
		_ = lock.Release(context.Background()) // lost, most of the time
		noError(t, errors.Join(l.Shutdown(context.Background()), rdb.Close()))
	})
	return lock
}

// workerEnv has the addresses of Redis and PostgreSQL in a process that is a worker instead of a test.
const workerEnv = "PGFENCE_TEST_WORKER"

func init() {
	redisAddr, url, ok := strings.Cut(os.Getenv(workerEnv), " ")
	if !ok {
		return
	}
	if err := work(context.Background(), redisAddr, url); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(0)
}

// work is a holder that reads, waits for a word on stdin, and writes. It says how that came out.
func work(ctx context.Context, redisAddr, url string) error {
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	l, err := redislock.New(redis.NewClient(&redis.Options{Addr: redisAddr}), fenced)
	if err != nil {
		return err
	}
	return l.Do(ctx, "account:7", func(held context.Context) error {
		lock, _ := redislock.FromContext(held)
		fence, _ := lock.Fence()
		if err := Claim(held, pool, "account:7", fence); err != nil {
			return err
		}
		var balance string
		if err := pool.QueryRow(held, "SELECT balance FROM accounts WHERE id = 7").Scan(&balance); err != nil {
			return err
		}
		fmt.Println("read", fence)
		if _, err := fmt.Scanln(new(string)); err != nil {
			return err
		}
		// Not with held: that it has ended can come to its notice after the write.
		err := pay(ctx, pool, fence, balance+"late")
		if errors.Is(err, ErrStale) {
			fmt.Println("refused:", err)
			return nil
		}
		fmt.Println("written:", err)
		return err
	})
}

func TestAWorkerThatWasStoppedPastItsTTLCanNotWrite(t *testing.T) {
	for name, start := range map[string]func(t *testing.T) (addr string, pass func(time.Duration)){
		"redis-server": func(t *testing.T) (string, func(time.Duration)) {
			return startRedis(t), func(time.Duration) {} // by itself
		},
		"miniredis": func(t *testing.T) (string, func(time.Duration)) {
			mini := miniredis.RunT(t)
			return mini.Addr(), mini.FastForward
		},
	} {
		t.Run(name, func(t *testing.T) {
			pool := bank(t)
			redisAddr, pass := start(t)
			worker := exec.Command(os.Args[0])
			worker.Env = append(os.Environ(), workerEnv+"="+redisAddr+" "+pool.Config().ConnString())
			in, err := worker.StdinPipe()
			noError(t, err)
			out, err := worker.StdoutPipe()
			noError(t, err)
			worker.Stderr = os.Stderr
			noError(t, worker.Start())
			t.Cleanup(func() {
				_ = worker.Process.Kill()
				_ = worker.Wait()
			})
			says := bufio.NewReader(out)
			hear := func() string {
				line, err := says.ReadString('\n')
				noError(t, err)
				return strings.TrimSpace(line)
			}
			var older int64
			if line := hear(); !parse(line, "read %d", &older) {
				t.Fatalf("the worker says %q", line)
			}
			noError(t, worker.Process.Signal(syscall.SIGSTOP))
			var status syscall.WaitStatus
			if _, err := syscall.Wait4(worker.Process.Pid, &status, syscall.WUNTRACED, nil); err != nil || !status.Stopped() {
				t.Fatalf("the worker has not stopped: %v, %v", status, err)
			}
			_, err = io.WriteString(in, "write\n") // once it wakes up
			noError(t, err)
			pass(2 * time.Second)

			newer, _ := fencedLock(t, redisAddr).Fence()
			if newer <= older {
				t.Errorf("%d came after %d", newer, older)
			}
			noError(t, Claim(t.Context(), pool, "account:7", newer))
			noError(t, pay(t.Context(), pool, newer, "second"))

			noError(t, worker.Process.Signal(syscall.SIGCONT))
			want := fmt.Sprintf("refused: pgfence: fence is stale: guard account:7 with fence %d: a later holder has been there", older)
			if line := hear(); line != want {
				t.Errorf("the worker says %q, want %q", line, want)
			}
			wantBalance(t, pool, "second")
			wantNumber(t, pool, "account:7", newer)
		})
	}
}

func parse(line, format string, to ...any) bool {
	_, err := fmt.Sscanf(line, format, to...)
	return err == nil
}

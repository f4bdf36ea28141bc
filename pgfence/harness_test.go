package pgfence

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"

	"example.com/redislock/internal/postgres"
)

// shared is the server of the tests that do not harm it. Each has a database of its own there.
var shared struct {
	sync.Mutex
	server *postgres.Server
	err    error
	last   atomic.Int64
}

func TestMain(m *testing.M) {
	code := m.Run()
	if shared.server != nil {
		if err := shared.server.Stop(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// skipOr ends a test that has no server, in one line.
func skipOr(t *testing.T, err error) {
	t.Helper()
	if errors.Is(err, postgres.ErrNotInstalled) && os.Getenv("REDISLOCK_REQUIRE_SERVERS") == "" {
		t.Skip("skipped: ", err)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// database makes a database with our tables on the shared server, and returns its URL.
func database(t *testing.T) string {
	t.Helper()
	shared.Lock()
	if shared.server == nil && shared.err == nil {
		shared.server, shared.err = postgres.Start("max_connections=300")
	}
	server, err := shared.server, shared.err
	shared.Unlock()
	skipOr(t, err)
	admin := connect(t, server.URL("postgres"))
	name := fmt.Sprintf("test%d", shared.last.Add(1))
	if _, err := admin.Exec(t.Context(), "CREATE DATABASE "+name); err != nil {
		t.Fatal(err)
	}
	admin.Close()
	url := server.URL(name)
	migrate(t, connect(t, url))
	return url
}

func migrate(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	if err := Migrate(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
}

// connect makes a pool that is closed with the test.
func connect(t *testing.T, url string, change ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConns = 10
	for _, f := range change {
		f(config)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// ownServer is a server for a test that breaks it.
func ownServer(t *testing.T, options ...string) *postgres.Server {
	t.Helper()
	server, err := postgres.Start(options...)
	skipOr(t, err)
	t.Cleanup(func() {
		if err := server.Stop(); err != nil {
			t.Error(err)
		}
	})
	return server
}

// eventually waits until what is said comes true.
func eventually(t *testing.T, what string, is func(context.Context) bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !is(t.Context()); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never came true: %s", what)
		}
	}
}

package redislock_test

import (
	"context"
	"database/sql"
	"errors"
	"expvar"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"example.com/redislock"
	"github.com/alicebob/miniredis/v2"
	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
)

// The examples hold the Go code of README.md; TestReadmeCodeCompiles sees to that.

// A worker that makes each night's report once, however many hosts enqueue it.
func Example() {
	makeReport := func(context.Context, *asynq.Task) error { return nil }

	work := func() error {
		rdb := redis.NewClient(&redis.Options{Addr: "localhost:6379"})
		locker, err := redislock.New(rdb, redislock.WithDoneFor(12*time.Hour))
		if err != nil {
			return err
		}
		mux := asynq.NewServeMux()
		mux.Use(locker.Middleware)
		mux.HandleFunc("report:nightly", makeReport)
		srv := asynq.NewServerFromRedisClient(rdb, redislock.ServerConfig(asynq.Config{}))
		if err := srv.Run(mux); err != nil { // works until SIGINT or SIGTERM
			return err
		}
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		return locker.Shutdown(ctx)
	}
	_ = work
}

// Several middlewares with different options stand side by side, each for the task types it names.
func ExampleWithTypes() {
	setUp := func(rdb redis.UniversalClient, mux *asynq.ServeMux) {
		mux.Use(redislock.Middleware(rdb,
			redislock.WithTypes("report:"),
			redislock.WithDoneFor(12*time.Hour),
			redislock.WithPolicy(redislock.Retry(5*time.Minute)),
		))
		mux.Use(redislock.Middleware(rdb,
			redislock.WithTypes("import:", "export:"),
			redislock.WithKey(redislock.Shared("tenant-data", redislock.ByJSON("tenant.id"))),
			redislock.WithPolicy(redislock.Wait(10*time.Second)),
		))
	}
	_ = setUp
}

// A write that is refused when a later holder of the lock has written.
func ExampleLock_Fence() {
	write := func(ctx context.Context, db *sql.DB, id int, body string) error {
		lock, ok := redislock.FromContext(ctx)
		if !ok {
			return errors.New("runs without a lock") // WithFailOpen, NoLock
		}
		fence, ok := lock.Fence()
		if !ok {
			return errors.New("the lock has no number")
		}
		result, err := db.ExecContext(ctx, `UPDATE report SET body = $1, fence = $2 WHERE id = $3 AND fence <= $2`, body, fence, id)
		if err != nil {
			return err
		}
		switch n, err := result.RowsAffected(); {
		case err != nil:
			return err
		case n == 0: // a later holder has written, or there is no such row
			return redislock.ErrLost
		}
		return nil
	}
	_ = write
}

// A KeyFunc of your own. Digest keeps what is in a payload out of Redis, and two payloads out of one name.
func ExampleDigest() {
	byTenant := func(_ context.Context, task *asynq.Task) (string, error) {
		tenant := task.Headers()["tenant"]
		if tenant == "" {
			return "", redislock.NoLock // nothing to be kept apart: run at once
		}
		return redislock.Digest("tenant", tenant), nil
	}

	task := asynq.NewTaskWithHeaders("import", nil, map[string]string{"tenant": "acme"})
	name, err := byTenant(context.Background(), task)
	fmt.Println(strings.HasPrefix(name, "tenant:"), len(name), strings.Contains(name, "acme"), err)
	// Output: true 39 false <nil>
}

// A policy that decides by what it finds.
func ExamplePolicyFunc() {
	policy := redislock.PolicyFunc(func(_ context.Context, task *asynq.Task, held *redislock.HeldError) error {
		if task.Type() == "cache:refresh" {
			return nil // drop it: a refresh is under way
		}
		held.RetryIn = time.Minute
		return held // put it back
	})
	_ = policy
}

// Check, right before the effect that must not happen twice.
func ExampleLock_Check() {
	var charge func(context.Context) error

	handler := func(ctx context.Context, task *asynq.Task) error {
		// ... what takes long ...
		if lock, ok := redislock.FromContext(ctx); ok {
			if err := lock.Check(ctx); err != nil {
				return err // somebody else may be at it by now
			}
		}
		return charge(ctx)
	}
	_ = handler
}

// A lock without a task.
func ExampleLocker_Do() {
	m, _ := miniredis.Run() // stands for your Redis
	defer m.Close()
	rdb := redis.NewClient(&redis.Options{Addr: m.Addr()})
	defer rdb.Close()
	ctx := context.Background()

	locker, err := redislock.New(rdb, redislock.WithDoneFor(time.Hour))
	if err != nil {
		panic(err)
	}
	for range 2 {
		err := locker.Do(ctx, "migrate:users", func(ctx context.Context) error {
			fmt.Println("migrating") // ctx ends when the lock is lost
			return nil
		})
		fmt.Println(err == nil, errors.Is(err, redislock.ErrHeld), errors.Is(err, redislock.ErrDone))
	}
	// Output:
	// migrating
	// true false false
	// false false true
}

// See who has the lock of a task, and free it.
func ExampleLocker_Holder() {
	free := func(ctx context.Context, locker *redislock.Locker, payload []byte) error {
		name, err := locker.Name(ctx, asynq.NewTask("report:nightly", payload))
		if err != nil {
			return err
		}
		holder, held, err := locker.Holder(ctx, name)
		if err != nil {
			return err
		}
		slog.InfoContext(ctx, "lock", "held", held, "done", holder.Done, "holder", holder.String())
		return locker.ForceRelease(ctx, name)
	}
	_ = free
}

// Count outcomes. The same hook feeds Prometheus or a trace.
func ExampleWithObserver() {
	outcomes := expvar.NewMap("redislock")
	count := redislock.WithObserver(func(_ context.Context, e redislock.Event) {
		outcomes.Add(string(e.Kind), 1)
	})
	_ = count
}

// TestReadmeCodeCompiles: a reader copies code from README.md, so each block of it stands in this file, which compiles, or is
// a whole program, which is built here.
func TestReadmeCodeCompiles(t *testing.T) {
	source, err := os.ReadFile("example_test.go")
	if err != nil {
		t.Fatal(err)
	}
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	here := unindented(string(source))
	blocks := strings.Split(string(readme), "\n```go\n")[1:]
	for i, block := range blocks {
		block, _, closed := strings.Cut(block, "\n```")
		name, _, _ := strings.Cut(block, "\n")
		t.Run(name, func(t *testing.T) {
			switch {
			case !closed:
				t.Error("the block has no end")
			case strings.HasPrefix(block, "package main"):
				build(t, block)
			case !strings.Contains(here, unindented(block)):
				t.Errorf("not in example_test.go:\n%s", block)
			}
			if lines := strings.Count(block, "\n") + 1; i == 0 && lines > 15 {
				t.Errorf("the first block has %d lines, want at most 15", lines)
			}
		})
	}
	if len(blocks) < 5 {
		t.Errorf("found only %d blocks of Go in README.md", len(blocks))
	}
}

// unindented strips what may differ between a block and its place in a function: indentation and empty lines.
func unindented(code string) string {
	var b strings.Builder
	b.WriteByte('\n')
	for line := range strings.Lines(code) {
		if line = strings.TrimSpace(line); line != "" {
			b.WriteString(line + "\n")
		}
	}
	return b.String()
}

func build(t *testing.T, program string) {
	if testing.Short() {
		t.Skip("builds a program")
	}
	file := filepath.Join(t.TempDir(), "main.go")
	if err := os.WriteFile(file, []byte(program), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("go", "build", "-o", os.DevNull, file).CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

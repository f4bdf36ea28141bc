//go:build unix

// Command fenced shows what a paused worker does to a bank account, and what keeps it from doing so. Two worker processes make one
// deposit each to account 7: read the balance, think, write the balance back. The first is stopped in the middle, for longer than
// its lock lives; the second takes over; the first wakes up and writes late. Under a plain lock a deposit is gone. With a
// fencing number, and under a row lock, the late write is refused, and made again on what is there by then.
//
//	go run .
//
// It starts a PostgreSQL (from /usr/lib/postgresql or PATH) and a redis-server (from PATH; one within this process will do) on
// loopback ports, and ends them. The handlers are in this file, the stage that they play on is in stage.go.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"example.com/redislock"
	"example.com/redislock/pgfence"
	"github.com/hibiken/asynq"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
)

func main() {
	var err error
	if role := os.Getenv(roleVariable); role != "" {
		err = work(role)
	} else {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
		defer stop()
		err = play(ctx, os.Stdout)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "fenced:", err)
		os.Exit(1)
	}
}

// deposit is the payload of a task.
type deposit struct {
	Account int `json:"account"`
	Amount  int `json:"amount"`
}

func depositOf(task *asynq.Task) (d deposit, err error) {
	if err := json.Unmarshal(task.Payload(), &d); err != nil {
		return d, fmt.Errorf("read payload: %w: %w", err, asynq.SkipRetry)
	}
	return d, nil
}

// worker has the handlers, one for each kind of lock.
type worker struct {
	pool *pgxpool.Pool
	// think takes its time. The context it returns does not end with the lock: a holder that wakes up from a pause is told that
	// its lock is lost, but may send what it was about to send before it hears that. These handlers always do.
	think func(ctx context.Context, balance int) context.Context
}

// plain relies on the lock alone.
func (w *worker) plain(ctx context.Context, task *asynq.Task) error {
	d, err := depositOf(task)
	if err != nil {
		return err
	}
	balance, err := read(ctx, w.pool, d.Account)
	if err != nil {
		return err
	}
	ctx = w.think(ctx, balance)
	return write(ctx, w.pool, d.Account, balance+d.Amount)
}

// fenced claims the account with the lock's number before it reads, and guards its write with it.
func (w *worker) fenced(ctx context.Context, task *asynq.Task) error {
	d, err := depositOf(task)
	if err != nil {
		return err
	}
	lock, ok := redislock.FromContext(ctx)
	if !ok {
		return errors.New("runs without a lock")
	}
	fence, ok := lock.Fence()
	if !ok {
		return errors.New("the lock has no number")
	}
	resource := fmt.Sprintf("account:%d", d.Account)
	if err := pgfence.Claim(ctx, w.pool, resource, fence); err != nil {
		return err
	}
	balance, err := read(ctx, w.pool, d.Account)
	if err != nil {
		return err
	}
	ctx = w.think(ctx, balance)
	return pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
		if err := pgfence.Guard(ctx, tx, resource, fence); err != nil {
			return err
		}
		return write(ctx, tx, d.Account, balance+d.Amount)
	})
}

// rowLocked reads and writes in the transaction that has its lock.
func (w *worker) rowLocked(ctx context.Context, task *asynq.Task) error {
	d, err := depositOf(task)
	if err != nil {
		return err
	}
	tx, ok := pgfence.Tx(ctx)
	if !ok {
		return errors.New("runs without a row lock")
	}
	balance, err := read(ctx, tx, d.Account)
	if err != nil {
		return err
	}
	ctx = w.think(ctx, balance)
	return write(ctx, tx, d.Account, balance+d.Amount)
}

// querier is a pool or a transaction.
type querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

func read(ctx context.Context, db querier, account int) (balance int, err error) {
	err = db.QueryRow(ctx, "SELECT balance FROM accounts WHERE id = $1", account).Scan(&balance)
	return balance, err
}

func write(ctx context.Context, db querier, account, balance int) error {
	_, err := db.Exec(ctx, "UPDATE accounts SET balance = $1 WHERE id = $2", balance, account)
	return err
}

// What an act puts between the workers.
const (
	actPlain   = "plain"
	actFenced  = "fenced"
	actRowLock = "row-lock"
)

const ttl = time.Second

// serve runs an asynq server until the process is told to stop.
func (w *worker) serve(act string, rdb *redis.Client, observe func(context.Context, redislock.Event)) error {
	options := redislock.Options(
		redislock.WithKey(redislock.ByJSON("account")), // deposits to one account share a lock
		redislock.WithTTL(ttl),
		redislock.WithPolicy(redislock.Wait(20*time.Second)),
		redislock.WithObserver(observe),
		redislock.WithLogger(slog.New(slog.DiscardHandler))) // the observer tells the story
	mux := asynq.NewServeMux()
	switch act {
	case actPlain:
		mux.Use(redislock.Middleware(rdb, options))
		mux.HandleFunc("deposit", w.plain)
	case actFenced:
		mux.Use(redislock.Middleware(rdb, options, redislock.WithFencing()))
		mux.HandleFunc("deposit", w.fenced)
	case actRowLock:
		mux.Use(pgfence.Middleware(w.pool, options))
		mux.HandleFunc("deposit", w.rowLocked)
	}
	srv := asynq.NewServerFromRedisClient(rdb, redislock.ServerConfig(asynq.Config{
		Concurrency:              1,
		LogLevel:                 asynq.FatalLevel,
		TaskCheckInterval:        50 * time.Millisecond,
		DelayedTaskCheckInterval: 50 * time.Millisecond,
		RetryDelayFunc:           func(int, error, *asynq.Task) time.Duration { return 0 }, // the audience waits
	}))
	return srv.Run(mux)
}

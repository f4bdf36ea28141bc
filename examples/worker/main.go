// Command worker is an asynq worker whose report:nightly handler runs once per night, however many hosts enqueue it.
//
//	worker -demo                     the whole story in one command, without a Redis
//	worker                           with a Redis of its own, at an address it prints
//	worker -redis localhost:6379     with yours (also: REDIS_ADDR)
package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"example.com/redislock"
	"github.com/alicebob/miniredis/v2"
	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
)

func main() {
	var w worker
	flag.StringVar(&w.redis, "redis", os.Getenv("REDIS_ADDR"), "host:port of Redis; empty: an embedded one (default: $REDIS_ADDR)")
	flag.IntVar(&w.concurrency, "concurrency", 4, "how many tasks to run at a time")
	flag.DurationVar(&w.ttl, "ttl", 30*time.Second, "how long a lock outlives a killed worker")
	flag.DurationVar(&w.doneFor, "done-for", 12*time.Hour, "how long a report counts as done; well under its period")
	flag.StringVar(&w.out, "out", "", "directory for the reports (default: a new temporary one)")
	demo := flag.Bool("demo", false, "play two nights of 20 hosts and exit; of the other flags only -out counts")
	flag.Parse()

	run := w.run
	if *demo {
		run = func() error {
			ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			return runDemo(ctx, os.Stdout, w.out)
		}
	}
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "worker:", err)
		os.Exit(1)
	}
}

type worker struct {
	redis        string
	concurrency  int
	ttl, doneFor time.Duration
	out          string
}

// run works until the process is told to stop (SIGINT or SIGTERM).
func (w worker) run() error {
	if w.redis == "" {
		m, err := embeddedRedis()
		if err != nil {
			return err
		}
		defer m.Close()
		w.redis = m.Addr()
		fmt.Println("embedded Redis at", w.redis)
	}
	rdb := redis.NewClient(&redis.Options{Addr: w.redis})
	defer rdb.Close()
	if err := ping(rdb); err != nil {
		return fmt.Errorf("reach Redis at %s: %w", w.redis, err)
	}
	if w.out == "" {
		dir, err := os.MkdirTemp("", "reports-")
		if err != nil {
			return err
		}
		w.out = dir
	} else if err := os.MkdirAll(w.out, 0o755); err != nil {
		return err
	}
	fmt.Println("reports go to", w.out)

	// WithDoneFor makes Retry the policy: copies that find the report being made stand by in case that fails, and go away
	// once it is done. The logger writes a line for each task that does not run, with the reason.
	locker, err := redislock.New(rdb,
		redislock.WithTTL(w.ttl),
		redislock.WithDoneFor(w.doneFor),
		redislock.WithLogger(slog.Default()))
	if err != nil {
		return err
	}
	mux := asynq.NewServeMux()
	mux.Use(locker.Middleware)
	mux.Handle("report:nightly", &reporter{dir: w.out, log: slog.Default()})

	srv := asynq.NewServerFromRedisClient(rdb, redislock.ServerConfig(asynq.Config{
		Concurrency: w.concurrency,
		LogLevel:    asynq.WarnLevel,
	}))
	slog.Info("worker started: stop it with SIGINT or SIGTERM", "redis", w.redis)
	if err := srv.Run(mux); err != nil { // returns after a signal, once handlers are done or put back
		return err
	}
	// Handlers that asynq has given up on may still run. Their locks are released as soon as they return.
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := locker.Shutdown(ctx); err != nil {
		return fmt.Errorf("shut down locks: %w", err)
	}
	slog.Info("worker stopped")
	return nil
}

// embeddedRedis starts a Redis inside this process, on a free port of the loopback interface.
func embeddedRedis() (*miniredis.Miniredis, error) {
	m := miniredis.NewMiniRedis()
	m.ClockTTL(true) // it is made for tests, where time stands still: without this no lock would ever expire
	if err := m.Start(); err != nil {
		return nil, fmt.Errorf("start embedded Redis: %w", err)
	}
	return m, nil
}

func ping(rdb *redis.Client) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return rdb.Ping(ctx).Err()
}

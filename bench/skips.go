package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"example.com/redislock"
)

// skipRow is how many round trips to Redis something takes.
type skipRow struct {
	what  string
	trips float64
}

// counted is a connection that counts what is sent: go-redis writes a command at once and waits for its reply.
type counted struct {
	net.Conn
	trips *atomic.Int64
}

func (c counted) Write(p []byte) (int, error) {
	c.trips.Add(1)
	return c.Conn.Write(p)
}

// countedClient has one connection, and has opened it.
func countedClient(ctx context.Context, addr string, trips *atomic.Int64) (*redis.Client, error) {
	rdb := redis.NewClient(&redis.Options{Addr: addr, PoolSize: 1, Dialer: func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, network, addr)
		return counted{conn, trips}, err
	}})
	return rdb, rdb.Ping(ctx).Err()
}

// skipTrips counts the round trips of a duplicate that is skipped, beside those of tasks that run.
func skipTrips(ctx context.Context, env *environment) ([]skipRow, error) {
	env.progress("round trips of a skipped duplicate")
	rows, err := countTrips(ctx, env.s.addr)
	if err != nil {
		return nil, fmt.Errorf("bench: count round trips: %w", err)
	}
	return rows, nil
}

func countTrips(ctx context.Context, addr string) (rows []skipRow, err error) {
	var trips atomic.Int64
	rdb, err := countedClient(ctx, addr, &trips)
	if err != nil {
		return nil, err
	}
	there := client(addr) // another process's
	defer func() { err = errors.Join(err, rdb.Close(), there.Close()) }()
	options := redislock.Options(redislock.WithLogger(quiet), redislock.WithPolicy(redislock.Skip()))
	here, err := redislock.New(rdb, options)
	if err != nil {
		return nil, err
	}
	marking, err := redislock.New(rdb, options, redislock.WithKeyPrefix("done:"), redislock.WithDoneFor(time.Minute))
	if err != nil {
		return nil, err
	}
	other, err := redislock.New(there, options)
	if err != nil {
		return nil, err
	}
	count := func(what string, do func() error) error {
		const n = 100
		if err := do(); err != nil { // loads the scripts
			return fmt.Errorf("%s: %w", what, err)
		}
		before := trips.Load()
		for range n {
			if err := do(); err != nil {
				return fmt.Errorf("%s: %w", what, err)
			}
		}
		rows = append(rows, skipRow{what, float64(trips.Load()-before) / n})
		return nil
	}
	task := asynq.NewTask("skip", nil)
	name, err := here.Name(ctx, task)
	if err != nil {
		return nil, err
	}
	nothing := func(context.Context) error { return nil }
	skipped := func(l *redislock.Locker) func() error {
		return func() error {
			return l.Middleware(asynq.HandlerFunc(func(context.Context, *asynq.Task) error { return errRan })).ProcessTask(ctx, task)
		}
	}
	under := func(l *redislock.Locker, what string) error {
		return l.Do(ctx, name, func(context.Context) error { return count(what, skipped(here)) })
	}
	pair := bareSide(rdb)
	err = errors.Join(
		under(other, "duplicate skipped, the lock is held by another process"),
		under(here, "duplicate skipped, the lock is held by this process"),
		marking.Do(ctx, name, nothing),
		count("duplicate skipped, its work is done (WithDoneFor)", skipped(marking)),
		count("task that runs: acquire and release", func() error { return here.Do(ctx, name, nothing) }),
		pair.do(ctx, "bare", func(ctx context.Context) error {
			return count("bare SET NX PX that finds the key", func() error { return rdb.SetNX(ctx, "bare", "x", time.Minute).Err() })
		}),
		count("bare SET NX PX + EVALSHA", func() error { return pair.do(ctx, "bare", nothing) }),
	)
	return rows, err
}

// errRan is why a count failed: nothing was skipped.
var errRan = errors.New("the task ran")

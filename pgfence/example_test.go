package pgfence_test

import (
	"context"
	"errors"
	"time"

	"example.com/redislock"
	"example.com/redislock/pgfence"
	"github.com/hibiken/asynq"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
)

// The examples hold the Go code of docs/choosing.md; TestPageCodeCompiles sees to that.

// A plain lock, and one that remembers what is done.
func Example_inRedis() {
	serve := func(rdb redis.UniversalClient, makeReport, refreshCache asynq.HandlerFunc) *asynq.ServeMux {
		mux := asynq.NewServeMux()
		mux.Use(redislock.Middleware(rdb, redislock.WithTypes("cache:")))
		mux.Use(redislock.Middleware(rdb, redislock.WithTypes("report:"), redislock.WithDoneFor(12*time.Hour)))
		mux.HandleFunc("cache:refresh", refreshCache)
		mux.HandleFunc("report:nightly", makeReport)
		return mux
	}
	_ = serve
}

// A handler that claims what it will write to, and guards what it writes.
func ExampleGuard() {
	price := func(context.Context) (int, error) { return 0, nil }

	serve := func(ctx context.Context, rdb redis.UniversalClient, pool *pgxpool.Pool) error {
		if err := pgfence.Migrate(ctx, pool); err != nil {
			return err
		}
		mux := asynq.NewServeMux()
		mux.Use(redislock.Middleware(rdb, redislock.WithFencing(), redislock.WithKey(redislock.ByJSON("id")))) // payload {"id": 7}
		mux.HandleFunc("price:update", func(ctx context.Context, _ *asynq.Task) error {
			lock, ok := redislock.FromContext(ctx)
			if !ok {
				return errors.New("runs without a lock") // WithFailOpen, NoLock
			}
			fence, ok := lock.Fence()
			if !ok {
				return errors.New("the lock has no number")
			}
			if err := pgfence.Claim(ctx, pool, "price:7", fence); err != nil {
				return err // ErrStale: a later holder has been there
			}
			cents, err := price(ctx) // the work
			if err != nil {
				return err
			}
			return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
				if err := pgfence.Guard(ctx, tx, "price:7", fence); err != nil {
					return err
				}
				_, err := tx.Exec(ctx, "UPDATE prices SET cents = $1 WHERE id = 7", cents)
				return err
			})
		})
		return asynq.NewServerFromRedisClient(rdb, redislock.ServerConfig(asynq.Config{})).Run(mux)
	}
	_ = serve
}

// A handler whose writes are committed with its done marker, or not at all.
func ExampleMiddleware() {
	serve := func(ctx context.Context, rdb redis.UniversalClient, pool *pgxpool.Pool) error {
		if err := pgfence.Migrate(ctx, pool); err != nil {
			return err
		}
		mux := asynq.NewServeMux()
		mux.Use(pgfence.Middleware(pool, redislock.WithDoneFor(12*time.Hour)))
		mux.HandleFunc("interest:daily", func(ctx context.Context, _ *asynq.Task) error {
			tx, ok := pgfence.Tx(ctx)
			if !ok {
				return errors.New("runs without a row lock") // NoLock
			}
			_, err := tx.Exec(ctx, "UPDATE accounts SET balance = balance * 1.0001")
			return err
		})
		return asynq.NewServerFromRedisClient(rdb, redislock.ServerConfig(asynq.Config{})).Run(mux)
	}
	_ = serve
}

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	peer "github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/google/uuid"
	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidislock"

	"example.com/redislock"
)

const ttl = 30 * time.Second

// side is one way to run work under a lock. Each has a client of its own, made as its documentation says.
type side struct {
	name string
	// do runs work under the lock of a name.
	do func(ctx context.Context, name string, work func(context.Context) error) error
	// hold takes the lock of a name and keeps it alive until the function it returns is called.
	hold func(ctx context.Context, name string) (release func(), err error)
	// middleware runs each task of an asynq server under a lock; without it, do has to.
	middleware asynq.MiddlewareFunc
	close      func() error
}

const (
	bare         = "bare SET NX PX + EVALSHA"
	asOurs       = "bare, saying what redislock says"
	ours         = "redislock"
	bsm          = "bsm/redislock"
	bsmAlive     = "bsm/redislock, refreshed"
	redsyncL     = "redsync"
	redsyncAlive = "redsync, refreshed"
	rueidisL     = "rueidislock"
)

var releaseScript = redis.NewScript(`if redis.call("get", KEYS[1]) == ARGV[1] then return redis.call("del", KEYS[1]) else return 0 end`)

func client(addr string) *redis.Client { return clientFor(addr, 64) }

// clientFor has a connection for each goroutine, so that nobody waits for one.
func clientFor(addr string, goroutines int) *redis.Client {
	return redis.NewClient(&redis.Options{Addr: addr, PoolSize: goroutines + 8, MinIdleConns: 8, ContextTimeoutEnabled: true})
}

// bareSide is what a lock costs at least: the two commands.
func bareSide(rdb redis.UniversalClient) side {
	return side{name: bare, do: func(ctx context.Context, name string, work func(context.Context) error) error {
		token := uuid.NewString()
		ok, err := rdb.SetNX(ctx, name, token, ttl).Result()
		if err != nil || !ok {
			return cmpErr(err, "taken")
		}
		werr := work(ctx)
		return errors.Join(werr, releaseScript.Run(ctx, rdb, []string{name}, token).Err())
	}, close: rdb.Close}
}

// asOursSide is the two commands with redislock's key and value, which say who holds the lock, and with GET, which tells that to
// the next who asks.
func asOursSide(rdb redis.UniversalClient) side {
	host, _ := os.Hostname()
	start := fmt.Sprintf(`redislock/1 {"host":"%s","pid":%d,"since":"`, host, os.Getpid())
	return side{name: asOurs, do: func(ctx context.Context, name string, work func(context.Context) error) error {
		key := "redislock:{" + name + "}"
		value := start + time.Now().UTC().Truncate(time.Millisecond).Format(time.RFC3339Nano) + `","token":"` + uuid.NewString() + `"}`
		set := redis.NewStatusCmd(ctx, "set", key, value, "nx", "get", "px", ttl.Milliseconds())
		_ = rdb.Process(ctx, set)
		if err := set.Err(); !errors.Is(err, redis.Nil) {
			return cmpErr(err, "taken")
		}
		werr := work(ctx)
		return errors.Join(werr, releaseScript.Run(ctx, rdb, []string{key}, value).Err())
	}, close: rdb.Close}
}

func ourSide(rdb redis.UniversalClient, opts ...redislock.Option) (side, error) {
	l, err := redislock.New(rdb, append([]redislock.Option{redislock.WithTTL(ttl), redislock.WithLogger(quiet)}, opts...)...)
	if err != nil {
		return side{}, err
	}
	return side{name: ours, do: l.Do, middleware: l.Middleware,
		hold: func(ctx context.Context, name string) (func(), error) {
			k, err := l.TryAcquire(ctx, name)
			if err != nil {
				return nil, err
			}
			return func() { _ = k.Release(ctx) }, nil
		},
		close: func() error { return errors.Join(l.Shutdown(context.Background()), rdb.Close()) }}, nil
}

var quiet = slog.New(slog.DiscardHandler)

func cmpErr(err error, text string) error {
	if err != nil {
		return err
	}
	return errors.New(text)
}

// keptAlive calls refresh from a goroutine, as the users of bsm/redislock and redsync must, until the function it returns is
// called. What fails is tried again the next time.
func keptAlive(ttl time.Duration, refresh, release func()) func() {
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		ticker := time.NewTicker(ttl / 3)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
				refresh()
			case <-stop:
				return
			}
		}
	}()
	return func() {
		close(stop)
		<-stopped
		release()
	}
}

func bsmSide(rdb *redis.Client, ttl time.Duration, refresh bool) side {
	l := peer.New(rdb)
	hold := func(ctx context.Context, name string) (func(), error) {
		lock, err := l.Obtain(ctx, name, ttl, nil)
		if err != nil {
			return nil, err
		}
		release := func() { _ = lock.Release(ctx) }
		if !refresh {
			return release, nil
		}
		return keptAlive(ttl, func() { _ = lock.Refresh(ctx, ttl, nil) }, release), nil
	}
	s := side{name: bsm, do: held(hold), hold: hold, close: rdb.Close}
	if refresh {
		s.name = bsmAlive
	}
	return s
}

func syncSide(rdb *redis.Client, ttl time.Duration, refresh bool) side {
	rs := redsync.New(goredis.NewPool(rdb))
	hold := func(ctx context.Context, name string) (func(), error) {
		m := rs.NewMutex(name, redsync.WithExpiry(ttl), redsync.WithTries(1),
			redsync.WithTimeoutFactor(0.25)) // for an answer, as the others
		if err := m.LockContext(ctx); err != nil {
			return nil, err
		}
		release := func() { _, _ = m.UnlockContext(ctx) }
		if !refresh {
			return release, nil
		}
		return keptAlive(ttl, func() { _, _ = m.ExtendContext(ctx) }, release), nil
	}
	s := side{name: redsyncL, do: held(hold), hold: hold, close: rdb.Close}
	if refresh {
		s.name = redsyncAlive
	}
	return s
}

func rueidisSide(addr string, ttl time.Duration) (side, error) {
	l, err := rueidislock.NewLocker(rueidislock.LockerOption{
		ClientOption: rueidis.ClientOption{InitAddress: []string{addr}}, KeyMajority: 1, NoLoopTracking: true,
		KeyValidity: ttl, ExtendInterval: ttl / 3,
		TryNextAfter: ttl / 4, // for an answer; there is no next key to try
	})
	if err != nil {
		return side{}, fmt.Errorf("bench: rueidislock: %w", err)
	}
	hold := func(ctx context.Context, name string) (func(), error) {
		_, cancel, err := l.TryWithContext(ctx, name)
		return cancel, err
	}
	return side{name: rueidisL, do: held(hold), hold: hold, close: func() error { l.Close(); return nil }}, nil
}

// held makes a do of a hold.
func held(hold func(context.Context, string) (func(), error)) func(context.Context, string, func(context.Context) error) error {
	return func(ctx context.Context, name string, work func(context.Context) error) error {
		release, err := hold(ctx, name)
		if err != nil {
			return err
		}
		defer release()
		return work(ctx)
	}
}

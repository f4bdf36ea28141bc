package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// The same sides on a client that gathers the commands of all goroutines into pipelines.
const (
	barePiped = "bare, auto-pipelined"
	oursPiped = "redislock, auto-pipelined"
)

var (
	peers = []string{bsm, bsmAlive, redsyncL, rueidisL}
	plain = append([]string{bare, asOurs, ours}, peers...)
	piped = []string{barePiped, oursPiped}
)

// concurrency is for how many goroutines the cost of a pair is measured.
var concurrency = []int{1, 8, 64, 512}

func open(name, addr string, goroutines int) (side, error) {
	if name == rueidisL {
		return rueidisSide(addr, ttl)
	}
	rdb := clientFor(addr, goroutines)
	switch name {
	case bare:
		return bareSide(rdb), nil
	case asOurs:
		return asOursSide(rdb), nil
	case ours:
		return ourSide(rdb)
	case bsm, bsmAlive:
		return bsmSide(rdb, ttl, name == bsmAlive), nil
	case redsyncL:
		return syncSide(rdb, ttl, false), nil
	case barePiped, oursPiped:
		return pipedSide(rdb, name)
	}
	return side{}, fmt.Errorf("bench: open side: there is no %q", name)
}

func pipedSide(rdb *redis.Client, name string) (side, error) {
	piped, err := rdb.AutoPipeline()
	if err != nil {
		return side{}, fmt.Errorf("bench: open side: %w", err)
	}
	s := bareSide(piped)
	if name == oursPiped {
		if s, err = ourSide(piped); err != nil {
			return side{}, err
		}
	}
	unpipe := s.close
	s.name, s.close = name, func() error { return errors.Join(unpipe(), rdb.Close()) }
	return s, nil
}

// openAll opens sides that are measured in turn. The function it returns closes them.
func openAll(names []string, addr string, goroutines int) (map[string]side, func(), error) {
	opened := make(map[string]side, len(names))
	closeAll := func() {
		for _, s := range opened {
			_ = s.close()
		}
	}
	for _, name := range names {
		s, err := open(name, addr, goroutines)
		if err != nil {
			closeAll()
			return nil, nil, err
		}
		opened[name] = s
	}
	return opened, closeAll, nil
}

func nothing(context.Context) error { return nil }

// pairs measures the microseconds per pair of acquire and release, by goroutines and side.
func pairs(ctx context.Context, env *environment) (map[int]map[string]samples, error) {
	micros, names := make(map[int]map[string]samples), slices.Concat(plain, piped)
	for _, goroutines := range concurrency {
		env.progress("acquire and release, goroutines: %d", goroutines)
		opened, closeAll, err := openAll(names, env.s.addr, goroutines)
		if err != nil {
			return nil, err
		}
		micros[goroutines], err = interleave(env.pairRounds(), names, func(name string, _ int) (float64, error) {
			return pairMicros(ctx, opened[name], goroutines, env.window())
		})
		closeAll()
		if err != nil {
			return nil, err
		}
	}
	return micros, nil
}

// pairMicros is the time of the window over the pairs that all goroutines together did in it, each with a name and, as a handler
// has, a context of its own.
func pairMicros(ctx context.Context, s side, goroutines int, window time.Duration) (float64, error) {
	var (
		done         atomic.Int64
		over         atomic.Bool
		errs         = make(chan error, goroutines)
		ready, ended sync.WaitGroup
		start        = make(chan struct{})
	)
	ready.Add(goroutines)
	for i := range goroutines {
		ended.Go(func() {
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			name := "pair:" + strconv.Itoa(i)
			err := s.do(ctx, name, nothing) // dials
			ready.Done()
			<-start
			n := int64(0)
			for ; err == nil && !over.Load(); n++ {
				err = s.do(ctx, name, nothing)
			}
			done.Add(n)
			errs <- err
		})
	}
	ready.Wait()
	began := time.Now()
	defer time.AfterFunc(window, func() { over.Store(true) }).Stop()
	close(start)
	ended.Wait()
	took := time.Since(began)
	close(errs)
	for err := range errs {
		if err != nil {
			return 0, err
		}
	}
	return float64(took.Nanoseconds()) / 1e3 / float64(done.Load()), nil
}

// repeat does n pairs one after the other.
func repeat(ctx context.Context, s side, n int) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for range n {
		if err := s.do(ctx, "pair", nothing); err != nil {
			return err
		}
	}
	return nil
}

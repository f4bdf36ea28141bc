package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"time"

	"example.com/redislock/faults/history"

	"example.com/redislock"
	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
)

// workerEnv makes this binary a worker; it holds a workerConfig.
const workerEnv = "REDISLOCK_FAULTS_WORKER"

type workerConfig struct {
	Process  string // names its history
	Dir      string
	LockAddr string // through the worker's proxy
	Queue    string // address of the queue's server
	Seed     uint64
	Deaf     float64 // share of the long handlers that don't look at their context
}

const (
	ttl             = time.Second
	doneFor         = 2 * time.Second
	grace           = 2 * time.Second
	taskTimeout     = 5 * time.Second
	shutdownTimeout = 300 * time.Millisecond // asynq's, before it puts running tasks back
	patience        = time.Second            // of Locker.Shutdown
)

// kinds are the task types. Each has a Locker with options of its own, and all share the work.
var kinds = []struct {
	name    string
	share   int // of the keys
	doneFor time.Duration
	opts    []redislock.Option
}{
	{"retry", 3, 0, []redislock.Option{redislock.WithPolicy(redislock.Retry(0))}},
	{"wait", 2, 0, []redislock.Option{redislock.WithPolicy(redislock.Wait(300 * time.Millisecond))}},
	{"skip", 2, 0, nil},
	{"once", 1, doneFor, []redislock.Option{redislock.WithDoneFor(doneFor)}},
}

// kindOfKey spreads the kinds over the numbers of the keys.
func kindOfKey(key int) string {
	n := 0
	for _, k := range kinds {
		n += k.share
	}
	key %= n
	for _, k := range kinds {
		if key -= k.share; key < 0 {
			return k.name
		}
	}
	panic("unreachable: the shares add up to n")
}

// manner is how a handler behaves. A task behaves the same wherever it runs, but fails at its first attempt only.
type manner struct {
	takes       time.Duration
	deaf        bool
	fails, dies bool
}

func mannerOf(seed uint64, task string, deaf float64) manner {
	h := fnv.New64a()
	io.WriteString(h, task)
	r := rand.New(rand.NewPCG(seed, h.Sum64()))
	m := manner{takes: time.Duration(1+r.IntN(50)) * time.Millisecond}
	if r.Float64() < 0.04 {
		m.takes = ttl + time.Duration(r.IntN(1500))*time.Millisecond
		if m.deaf = r.Float64() < deaf; m.deaf && r.Float64() < 0.5 {
			m.takes = taskTimeout + grace + ttl + time.Duration(r.IntN(2000))*time.Millisecond // outlives its lock
		}
	}
	switch p := r.Float64(); {
	case p < 0.02:
		m.fails = true
	case p < 0.025:
		m.dies = true
	}
	return m
}

type deliveryKey struct{}

type worker struct {
	workerConfig
	history    *history.Writer
	deliveries atomic.Int64
}

// runWorker is the whole life of a worker process: it works until SIGTERM, then shuts down in order.
func runWorker(config string) error {
	w := &worker{}
	if err := json.Unmarshal([]byte(config), &w.workerConfig); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	var err error
	if w.history, err = history.Create(w.Dir, w.Process); err != nil {
		return err
	}
	go w.watchStalls()

	rdb := redis.NewClient(&redis.Options{Addr: w.LockAddr})
	defer rdb.Close()
	redis.SetLogger(silent{})
	mux := asynq.NewServeMux()
	mux.Use(w.see)
	var lockers []*redislock.Locker
	for _, k := range kinds {
		locker, err := redislock.New(rdb, append(k.opts, redislock.WithTypes(k.name), redislock.WithTTL(ttl), redislock.WithGracePeriod(grace),
			redislock.WithObserver(w.observe), redislock.WithLogger(slog.New(slog.DiscardHandler)))...)
		if err != nil {
			return err
		}
		mux.Use(locker.Middleware)
		lockers = append(lockers, locker)
		mux.HandleFunc(k.name, func(ctx context.Context, task *asynq.Task) error { return w.work(ctx, k.doneFor) })
	}
	srv := asynq.NewServer(asynq.RedisClientOpt{Addr: w.Queue}, redislock.ServerConfig(asynq.Config{
		Concurrency:              8,
		TaskCheckInterval:        50 * time.Millisecond,
		DelayedTaskCheckInterval: 200 * time.Millisecond,
		ShutdownTimeout:          shutdownTimeout,
		RetryDelayFunc:           func(int, error, *asynq.Task) time.Duration { return 500 * time.Millisecond },
		Logger:                   silent{},
		LogLevel:                 asynq.FatalLevel,
	}))
	if err := srv.Start(mux); err != nil {
		return err
	}
	<-ctx.Done()
	srv.Shutdown()
	bound, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var bye history.Record
	for _, locker := range lockers {
		if err := locker.Shutdown(bound); err != nil {
			bye.Err = err.Error()
		}
	}
	bye.Kind = history.KindBye
	w.history.Add(bye)
	// Not closed: handlers that ignore their context may still write until the process is gone.
	return nil
}

// see stands outside of the lock's middleware and numbers the deliveries, to balance the books by.
func (w *worker) see(next asynq.Handler) asynq.Handler {
	return asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
		n := w.deliveries.Add(1)
		id, _ := asynq.GetTaskID(ctx)
		w.history.Add(history.Record{Kind: history.KindSeen, Delivery: n, Task: id})
		return next.ProcessTask(context.WithValue(ctx, deliveryKey{}, n), task)
	})
}

func (w *worker) observe(ctx context.Context, e redislock.Event) {
	r := history.Record{Kind: string(e.Kind), Task: e.TaskID, Key: e.Key, Holder: e.Holder.TaskID}
	r.Delivery, _ = ctx.Value(deliveryKey{}).(int64)
	if e.Err != nil {
		r.Err = e.Err.Error()
	}
	w.history.Add(r)
}

// work is the handler: a critical section that does not trust the lock.
func (w *worker) work(ctx context.Context, doneFor time.Duration) (err error) {
	lock, ok := redislock.FromContext(ctx)
	if !ok {
		return errors.New("runs without a lock")
	}
	id, _ := asynq.GetTaskID(ctx)
	retried, _ := asynq.GetRetryCount(ctx)
	n, _ := ctx.Value(deliveryKey{}).(int64)
	m := mannerOf(w.Seed, id, w.Deaf)

	file, err := os.OpenFile(filepath.Join(w.Dir, "flock", lock.Key()), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer file.Close() // frees the file lock, as the end of the process does
	clash := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil

	r := history.Record{Delivery: n, Task: id, Key: lock.Key(), Deaf: m.deaf, DoneFor: int64(doneFor)}
	enter := r
	enter.Kind, enter.Clash = history.KindEnter, clash
	w.history.Add(enter)
	defer func() { // before the file lock is freed
		r.Kind = history.KindExit
		switch p := recover(); {
		case p != nil:
			r.Err = fmt.Sprint("panic: ", p)
			defer panic(p)
		case err != nil:
			r.Err = err.Error()
		}
		w.history.Add(r)
	}()

	timer := time.NewTimer(m.takes)
	defer timer.Stop()
	end := ctx.Done()
	if m.deaf {
		end = nil
	}
	select {
	case <-timer.C:
	case <-end:
		return context.Cause(ctx)
	}
	switch {
	case retried > 0:
	case m.fails:
		return errors.New("fails at its first attempt")
	case m.dies:
		panic("dies at its first attempt")
	}
	return nil
}

const (
	stallTick = 10 * time.Millisecond
	stallMin  = 40 * time.Millisecond
)

// watchStalls notes when this process did not get to run. A lock's promise is about clocks and timers that do.
func (w *worker) watchStalls() {
	for last := history.Now(); ; {
		time.Sleep(stallTick)
		t := history.Now()
		if t-last > int64(stallTick+stallMin) {
			w.history.Add(history.Record{Kind: history.KindStall, T: last, Until: t})
		}
		last = t
	}
}

// silent is a logger for what a campaign breaks on purpose.
type silent struct{}

func (silent) Debug(...any)                           {}
func (silent) Info(...any)                            {}
func (silent) Warn(...any)                            {}
func (silent) Error(...any)                           {}
func (silent) Fatal(args ...any)                      { fmt.Fprintln(os.Stderr, args...); os.Exit(1) }
func (silent) Printf(context.Context, string, ...any) {}

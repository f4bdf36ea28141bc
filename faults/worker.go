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
	"strconv"
	"sync/atomic"
	"syscall"
	"time"

	"example.com/redislock"
	"example.com/redislock/faults/history"
	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
)

// workerEnv makes this binary a worker; it holds a workerConfig.
const workerEnv = "REDISLOCK_FAULTS_WORKER"

type workerConfig struct {
	Process  string // names its history
	Dir      string
	LockAddr string // through the worker's proxy
	Queue    string // address of the queue's server, or of the proxy in front of it
	Seed     uint64
	Deaf     float64       // share of the long handlers that don't look at their context
	Grace    time.Duration // of the locks
	Linger   time.Duration // how long a few handlers go on at least, deaf; 0: none
}

const (
	ttl             = time.Second
	doneFor         = 2 * time.Second
	grace           = 2 * time.Second
	taskTimeout     = 5 * time.Second
	shutdownTimeout = 300 * time.Millisecond // asynq's, before it puts running tasks back
	patience        = time.Second            // of Locker.Shutdown
)

const lockPrefix = "redislock:"

// kind is a task type. Each has a Locker with options of its own, and all share the work.
type kind struct {
	name     string
	share    int // of the keys
	doneFor  time.Duration
	twice    bool // the middleware is mounted around itself
	failOpen bool
	fenced   bool
	opts     []redislock.Option
}

var kinds = []kind{
	{name: "retry", share: 3, opts: []redislock.Option{redislock.WithPolicy(redislock.Retry(0))}},
	{name: "wait", share: 2, opts: []redislock.Option{redislock.WithPolicy(redislock.Wait(300 * time.Millisecond))}},
	{name: "skip", share: 2},
	{name: "once", share: 1, doneFor: doneFor, opts: []redislock.Option{redislock.WithDoneFor(doneFor)}},
	{name: "archive", share: 1, opts: []redislock.Option{redislock.WithPolicy(redislock.Archive())}},
	{name: "func", share: 1, opts: []redislock.Option{redislock.WithPolicy(redislock.PolicyFunc(decide))}},
	{name: "nested", share: 1, twice: true, opts: []redislock.Option{redislock.WithPolicy(redislock.Retry(0))}},
	{name: "fenced", share: 1, fenced: true, opts: []redislock.Option{redislock.WithPolicy(redislock.Retry(0)), redislock.WithFencing()}},
	{name: "open", share: 1, failOpen: true, opts: []redislock.Option{redislock.WithPolicy(redislock.Retry(0)), redislock.WithFailOpen()}},
}

// choice is what decide does with a task, 0 to 3. A task gets the same wherever it is.
func choice(task string) uint64 { return hash(task) % 4 }

// decide is the function of PolicyFunc.
func decide(ctx context.Context, _ *asynq.Task, held *redislock.HeldError) error {
	id, _ := asynq.GetTaskID(ctx)
	return decideFor(id, held)
}

func decideFor(task string, held *redislock.HeldError) error {
	switch choice(task) {
	case 0:
		return nil
	case 1:
		return held
	case 2:
		return fmt.Errorf("not worth another try: %w", asynq.SkipRetry)
	default:
		return errors.New("an ordinary failure")
	}
}

// mayDrop tells which tasks a policy drops.
func mayDrop(taskType, task string) bool {
	return taskType == "skip" || taskType == "func" && choice(task) == 0
}

func hash(text string) uint64 {
	h := fnv.New64a()
	io.WriteString(h, text)
	return h.Sum64()
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
	r := rand.New(rand.NewPCG(seed, hash(task)))
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
	go watchStalls(context.Background(), w.history) // until the process is gone

	rdb := redis.NewClient(&redis.Options{Addr: w.LockAddr})
	defer rdb.Close()
	redis.SetLogger(silent{})
	mux := asynq.NewServeMux()
	mux.Use(w.see)
	var lockers []*redislock.Locker
	for _, k := range kinds {
		locker, err := redislock.New(rdb, append(k.opts, redislock.WithTypes(k.name), redislock.WithTTL(ttl), redislock.WithGracePeriod(w.Grace),
			redislock.WithObserver(w.observe), redislock.WithLogger(slog.New(slog.DiscardHandler)))...)
		if err != nil {
			return err
		}
		lockers = append(lockers, locker)
		var handler asynq.Handler = asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error { return w.work(ctx, task, k, locker) })
		if k.twice {
			handler = w.see(locker.Middleware(handler))
		}
		mux.Use(locker.Middleware)
		mux.Handle(k.name, handler)
	}
	srv := asynq.NewServer(asynq.RedisClientOpt{Addr: w.Queue}, redislock.ServerConfig(asynq.Config{
		Concurrency:              16,
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

// see stands outside of a lock's middleware and numbers the deliveries, to balance the books by.
func (w *worker) see(next asynq.Handler) asynq.Handler {
	return asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
		n := w.deliveries.Add(1)
		id, _ := asynq.GetTaskID(ctx)
		outer, _ := ctx.Value(deliveryKey{}).(int64)
		w.history.Add(history.Record{Kind: history.KindSeen, Delivery: n, Outer: outer, Task: id})
		return next.ProcessTask(context.WithValue(ctx, deliveryKey{}, n), task)
	})
}

func (w *worker) observe(ctx context.Context, e redislock.Event) {
	r := history.Record{Kind: string(e.Kind), Task: e.TaskID, Type: e.TaskType, Key: e.Key, Holder: e.Holder.TaskID, Unlocked: e.Unlocked}
	r.Delivery, _ = ctx.Value(deliveryKey{}).(int64)
	if e.Err != nil {
		r.Err = e.Err.Error()
	}
	w.history.Add(r)
}

// work is the handler: a critical section that does not trust the lock.
func (w *worker) work(ctx context.Context, task *asynq.Task, k kind, locker *redislock.Locker) (err error) {
	key, fence, err := lockOf(ctx, task, k, locker)
	if err != nil {
		return err
	}
	id, _ := asynq.GetTaskID(ctx)
	retried, _ := asynq.GetRetryCount(ctx)
	n, _ := ctx.Value(deliveryKey{}).(int64)
	m := mannerOf(w.Seed, id, w.Deaf)
	if w.Linger > 0 && hash(id)%8 == 0 {
		m.deaf, m.takes = true, w.Linger+5*time.Second+m.takes
	}

	file, err := os.OpenFile(filepath.Join(w.Dir, "flock", key), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer file.Close() // frees the file lock, as the end of the process does
	clash := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil

	r := history.Record{Delivery: n, Task: id, Key: key, Deaf: m.deaf, DoneFor: int64(k.doneFor), Unlocked: fence == noLock, Fence: max(fence, 0)}
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

	if r.Fence > 0 { // so that older holders are refused from now on
		if err := w.write(r); err != nil {
			return err
		}
		defer func() { // late, if need be
			if err == nil {
				err = w.write(r)
			}
		}()
	}
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

// noLock stands for the number of a handler that runs without a lock.
const noLock = -1

// lockOf returns the key of the lock that the task runs under, or would run under, and its number: 0 without fencing.
func lockOf(ctx context.Context, task *asynq.Task, k kind, locker *redislock.Locker) (key string, fence int64, err error) {
	lock, ok := redislock.FromContext(ctx)
	switch {
	case ok:
		fence, ok := lock.Fence()
		if k.fenced && !ok {
			return "", 0, errors.New("no fencing number")
		}
		return lock.Key(), fence, nil
	case !k.failOpen:
		return "", 0, errors.New("runs without a lock")
	}
	name, err := locker.Name(ctx, task)
	return lockPrefix + "{" + name + "}", noLock, err
}

// write writes to what the lock guards: a file that refuses a lower number than it has.
func (w *worker) write(r history.Record) error {
	file, err := os.OpenFile(filepath.Join(w.Dir, "fenced", r.Key), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer file.Close()
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX); err != nil {
		return err
	}
	text, err := io.ReadAll(file)
	if err != nil {
		return err
	}
	last, _ := strconv.ParseInt(string(text), 10, 64) // a new file has none
	r.Kind = history.KindWrite
	if r.Fence < last {
		r.Err = "a later holder has written"
	} else if _, err := file.WriteAt(fmt.Appendf(nil, "%019d", r.Fence), 0); err != nil {
		return err
	}
	w.history.Add(r)
	if r.Err != "" {
		return errors.New(r.Err)
	}
	return nil
}

const (
	stallTick = 10 * time.Millisecond
	stallMin  = 40 * time.Millisecond
)

// watchStalls notes when this process did not get to run. A lock's promise is about clocks and timers that do.
func watchStalls(ctx context.Context, h *history.Writer) {
	for last := history.Now(); sleep(ctx, stallTick); {
		t := history.Now()
		if t-last > int64(stallTick+stallMin) {
			h.Add(history.Record{Kind: history.KindStall, T: last, Until: t})
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

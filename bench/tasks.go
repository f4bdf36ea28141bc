package main

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"github.com/hibiken/asynq"

	"example.com/redislock"
)

const (
	noLock      = "no lock"
	taskWorkers = 64
	taskType    = "bench:task"
)

// locksOfTasks are what a handler is put under. The first has no side.
var locksOfTasks = slices.Concat([]string{noLock}, plain, []string{oursPiped})

// handlerTimes is how long the handlers work.
var handlerTimes = []time.Duration{0, 5 * time.Millisecond}

// tasks measures the tasks per second of an asynq server with its queue full, by the time a handler takes and the lock around it.
func tasks(ctx context.Context, env *environment) (map[time.Duration]map[string]samples, error) {
	opened, closeAll, err := openAll(locksOfTasks[1:], env.s.addr, taskWorkers)
	if err != nil {
		return nil, err
	}
	defer closeAll()
	rates := make(map[time.Duration]map[string]samples)
	for _, busy := range handlerTimes {
		env.progress("asynq server, %s", handlers(busy))
		rates[busy], err = interleave(env.taskRounds(), locksOfTasks, func(name string, _ int) (float64, error) {
			return taskRate(ctx, env, opened[name], busy)
		})
		if err != nil {
			return nil, err
		}
	}
	return rates, nil
}

// taskRate fills the queue, then starts a server and takes the time until the last handler has returned.
func taskRate(ctx context.Context, env *environment, s side, busy time.Duration) (float64, error) {
	n := env.count(3000)
	if err := enqueue(ctx, env.s.addr, n); err != nil {
		return 0, err
	}
	var left atomic.Int64
	left.Store(int64(n))
	ended := make(chan error, n)
	handler := around(s)(asynq.HandlerFunc(func(context.Context, *asynq.Task) error {
		time.Sleep(busy)
		return nil
	}))
	config := asynq.Config{
		Concurrency: taskWorkers, LogLevel: asynq.ErrorLevel,
		TaskCheckInterval: 100 * time.Millisecond, // of an empty queue, which Shutdown waits for
	}
	if s.middleware != nil {
		config = redislock.ServerConfig(config)
	}
	srv := asynq.NewServer(asynq.RedisClientOpt{Addr: env.s.addr}, config)
	runtime.GC() // what filling the queue has left
	began := time.Now()
	err := srv.Start(asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
		err := handler.ProcessTask(ctx, task)
		if left.Add(-1) == 0 || err != nil {
			ended <- err
		}
		return err
	}))
	if err != nil {
		return 0, err
	}
	defer srv.Shutdown()
	select {
	case err = <-ended:
	case <-ctx.Done():
		err = ctx.Err()
	}
	return float64(n) / time.Since(began).Seconds(), err
}

// around makes a middleware of a side, of the one without a lock, too.
func around(s side) asynq.MiddlewareFunc {
	switch {
	case s.middleware != nil:
		return s.middleware
	case s.do == nil:
		return func(next asynq.Handler) asynq.Handler { return next }
	}
	return func(next asynq.Handler) asynq.Handler {
		return asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
			name := task.Type() + ":" + string(task.Payload())
			return s.do(ctx, name, func(ctx context.Context) error { return next.ProcessTask(ctx, task) })
		})
	}
}

// flush leaves nothing of what was measured before.
func flush(ctx context.Context, addr string) error {
	rdb := client(addr)
	defer rdb.Close()
	return rdb.FlushAll(ctx).Err()
}

// enqueue fills the queue, and nothing else, with tasks, no two of which are the same work.
func enqueue(ctx context.Context, addr string, n int) error {
	if err := flush(ctx, addr); err != nil {
		return err
	}
	queue := asynq.NewClient(asynq.RedisClientOpt{Addr: addr})
	defer queue.Close()
	var next atomic.Int64
	errs := make(chan error, 16)
	for range cap(errs) {
		go func() {
			for i := next.Add(1); i <= int64(n); i = next.Add(1) {
				if _, err := queue.EnqueueContext(ctx, asynq.NewTask(taskType, fmt.Append(nil, i))); err != nil {
					errs <- err
					return
				}
			}
			errs <- nil
		}()
	}
	var failed error
	for range cap(errs) {
		if err := <-errs; err != nil {
			failed = err
		}
	}
	return failed
}

package redislock

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
)

// Middleware returns a middleware that runs each task under its lock: New and Locker.Middleware in one. It panics where New
// returns an error, as asynq does for mistakes at set-up. To shut the locks down in order, use New and keep the Locker.
func Middleware(rdb redis.UniversalClient, opts ...Option) asynq.MiddlewareFunc {
	l, err := New(rdb, opts...)
	if err != nil {
		panic(err.Error())
	}
	return l.Middleware
}

// Middleware runs next under the task's lock, with a context that ends when the task's does or the lock is lost. Whatever
// next returns is what asynq sees. A task that does not get its lock is dropped, put back or archived as the policy says.
func (l *Locker) Middleware(next asynq.Handler) asynq.Handler {
	return asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
		if !l.handles(task.Type()) {
			return next.ProcessTask(ctx, task)
		}
		return l.process(ctx, task, next)
	})
}

// errUnfinished stands in an event for the result of a handler that has none.
var errUnfinished = errors.New("redislock: the handler did not return: it panicked or called runtime.Goexit")

// process is a task's whole way: its key, its lock, its run, its release, its result. Whichever way it ends, even in a
// panic, there is one outcome.
func (l *Locker) process(ctx context.Context, task *asynq.Task, next asynq.Handler) (err error) {
	began := time.Now()
	self := l.self(ctx, task.Type())
	e := Event{Kind: EventRefused, TaskID: self.TaskID, TaskType: self.TaskType, Queue: self.Queue, Err: errUnfinished}
	defer func() { l.emit(ctx, e) }()
	run := func(kind EventKind, under func(func(context.Context) error) error) error {
		e.Kind, e.Waited = kind, time.Since(began)
		defer func() { e.Held = time.Since(began) - e.Waited }()
		err := under(func(ctx context.Context) error { return next.ProcessTask(ctx, task) })
		e.Err = err
		return ofRun(task, err)
	}
	unlocked := func(handler func(context.Context) error) error { return handler(ctx) }

	name, err := l.Name(ctx, task)
	if errors.Is(err, NoLock) {
		return run(EventPassed, unlocked)
	}
	if err == nil {
		e.Key, err = l.redisKey(name)
	}
	if err == nil {
		var nested bool
		if nested, err = l.nested(ctx, e.Key); nested {
			return run(EventPassed, unlocked)
		}
	}
	if err != nil {
		e.Err = err
		return err
	}

	lock, v := l.obtain(ctx, task, e.Key)
	if lock != nil {
		l.begin() // until the outcome is told, so that Shutdown returns with balanced books
		defer l.leave()
		return run(EventRan, lock.hold)
	}
	e.Kind, e.Holder, e.Err, e.Waited = v.kind, v.holder, v.err, time.Since(began)
	if v.kind == EventRan {
		e.Unlocked = true
		l.log().LogAttrs(ctx, slog.LevelWarn, "redislock: task runs without a lock: Redis is unavailable and WithFailOpen is set",
			slog.String("key", e.Key), slog.String("task_id", e.TaskID), slog.String("task_type", e.TaskType), slog.String("reason", v.err.Error()))
		return run(EventRan, unlocked)
	}
	return v.err
}

// ofRun is the result of a handler that ran. What it brings back of another task's contention is a failure like any other.
func ofRun(task *asynq.Task, err error) error {
	var c *contention
	if errors.As(err, &c) && c.task != task {
		return &ofHandler{err}
	}
	return err
}

// nested reports whether the lock of this key is held further up the call chain, so that the task is already safe. It fails
// where the outer lock does not do what this Locker's options promise.
func (l *Locker) nested(ctx context.Context, key string) (bool, error) {
	for k, _ := FromContext(ctx); k != nil; k = k.outer {
		if k.key != key || k.locker.rdb != l.rdb || k.isReleased() {
			continue
		}
		if o := k.locker; o.ttl != l.ttl || o.doneFor != l.doneFor || o.grace != l.grace || o.failOpen != l.failOpen {
			return false, fmt.Errorf("redislock: acquire lock %s: already held further up the call chain, with another TTL, done-for, grace period or fail-open", key)
		}
		if _, ended := k.validity(); ended != nil {
			return false, fmt.Errorf("redislock: acquire lock %s: held further up the call chain and no longer valid: %w", key, ended)
		}
		return true, nil
	}
	return false, nil
}

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

// errUnfinished stands in an event for the result of a handler, KeyFunc or PolicyFunc that has none.
var errUnfinished = errors.New("redislock: no result: it panicked or called runtime.Goexit")

// process is a task's whole way: its key, its lock, its run, its release, its result. Whichever way it ends, even in a
// panic, there is one outcome.
func (l *Locker) process(ctx context.Context, task *asynq.Task, next asynq.Handler) error {
	began, self := time.Now(), l.self(ctx, task.Type())
	e := Event{Kind: EventRefused, TaskID: self.TaskID, TaskType: self.TaskType, Queue: self.Queue, Err: errUnfinished}
	over := func() {}
	defer func() {
		l.emit(ctx, e)
		over()
	}()

	key, lock, v := l.admit(ctx, task)
	e.Key, e.Kind, e.Holder, e.Waited = key, v.kind, v.holder, time.Since(began)
	if v.kind != EventRan && v.kind != EventPassed {
		e.Err = v.err
		if v.err == nil {
			dropWithin(ctx, self)
		}
		return v.err
	}
	l.begin() // until the outcome is told, so that Shutdown returns with balanced books
	over = l.leave
	under := func(handler func(context.Context) error) error { return handler(ctx) }
	if lock != nil {
		under = lock.hold
		defer func() { e.Held = time.Since(lock.since) }()
	} else if v.kind == EventRan {
		e.Unlocked = true
		l.log().LogAttrs(ctx, slog.LevelWarn, "redislock: task runs without a lock: Redis is unavailable and WithFailOpen is set",
			slog.String("key", e.Key), slog.String("task_id", e.TaskID), slog.String("task_type", e.TaskType), slog.String("reason", v.err.Error()))
	}
	e.Err = under(func(ctx context.Context) error { return next.ProcessTask(ctx, task) })
	return ofRun(task, e.Err)
}

// admit finds a task's key and what it may do: run under the lock, run without one, or not run.
func (l *Locker) admit(ctx context.Context, task *asynq.Task) (key string, lock *Lock, v verdict) {
	name, err := l.Name(ctx, task)
	if errors.Is(err, NoLock) {
		return "", nil, verdict{kind: EventPassed}
	}
	if err == nil {
		key, err = l.redisKey(name)
	}
	nested := false
	if err == nil {
		nested, err = l.nested(ctx, key)
	}
	switch {
	case err != nil:
		return key, nil, verdict{kind: EventRefused, err: err}
	case nested:
		return key, nil, verdict{kind: EventPassed}
	}
	lock, v = l.obtain(ctx, task, key)
	return key, lock, v
}

// heldAround reports whether the holder that was found at the key is a lock of this very call chain. nested has not seen it
// where two clients lead to one Redis, and a task must not wait for itself.
func heldAround(ctx context.Context, held *HeldError) bool {
	for k := range locksAround(ctx) {
		if k.key == held.Key && k.self == held.Holder {
			return true
		}
	}
	return false
}

// dropWithin tells the locks around a task that it was dropped, so that none takes this silence for a successful run and leaves
// a done marker.
func dropWithin(ctx context.Context, self Holder) {
	for k := range locksAround(ctx) {
		if k.self.TaskID == self.TaskID && k.self.Queue == self.Queue && k.self.TaskType == self.TaskType {
			k.unrun.Store(true)
		}
	}
}

// ofRun is the result of a handler that ran. What it brings back of another task's contention is a failure like any other.
func ofRun(task *asynq.Task, err error) error {
	if c := contentionIn(err); c != nil && c.task != task {
		return &ofHandler{err}
	}
	return err
}

// nested reports whether the lock of this key is held further up the call chain, so that the task is already safe. It fails
// where the outer lock does not do what this Locker's options promise.
func (l *Locker) nested(ctx context.Context, key string) (bool, error) {
	for k := range locksAround(ctx) {
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

package redislock

import (
	"context"
	"errors"
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
		l.emit(ctx, &e)
		over()
	}()

	key, lock, v := l.admit(ctx, task, self, began)
	e.Key, e.Kind, e.Holder, e.Waited = key, v.kind, v.holder, time.Since(began)
	if v.kind != EventRan && v.kind != EventPassed {
		e.Err = v.err
		if v.err == nil {
			dropWithin(ctx, self)
		}
		return v.err
	}
	over = l.leave // counted until the outcome is told, so that Shutdown returns with balanced books
	e.Unlocked = lock == nil && v.kind == EventRan
	if e.Unlocked { // judge has counted it
		l.warnUnlocked(ctx, e, v.err)
	} else {
		l.begin()
	}
	under := func(handler func(context.Context) error) error { return handler(ctx) }
	if lock != nil {
		under = lock.hold
		defer func() { e.Held = lock.heldFor() }()
	}
	e.Err = under(func(ctx context.Context) error { return next.ProcessTask(ctx, task) })
	return ofRun(task, e.Err)
}

func (l *Locker) warnUnlocked(ctx context.Context, e Event, why error) {
	e.Err = why
	l.log().LogAttrs(ctx, slog.LevelWarn, "redislock: task runs without a lock: Redis is unavailable and WithFailOpen is set", e.attrs()...)
}

// admit finds a task's key and what it may do: run under the lock, run without one, or not run.
func (l *Locker) admit(ctx context.Context, task *asynq.Task, self Holder, began time.Time) (key string, lock *Lock, v verdict) {
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
	lock, v = l.obtain(ctx, task, key, self, began)
	return key, lock, v
}

// ofRun is the result of a handler that ran. What it brings back of another task's contention is a failure like any other.
func ofRun(task *asynq.Task, err error) error {
	if c := contentionIn(err); c != nil && c.task != task {
		return &ofHandler{err}
	}
	return err
}

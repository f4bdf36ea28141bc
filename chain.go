package redislock

import (
	"context"
	"fmt"
	"iter"
)

// A handler, or a function given to Do, may run under several locks: middlewares within middlewares, Do within a handler.
// Its context leads from the innermost outwards.

type lockContextKey struct{}

// lockContext is a context that leads to its lock.
type lockContext struct {
	context.Context
	lock *Lock
}

func (c *lockContext) Value(key any) any {
	if key == (lockContextKey{}) {
		return c.lock
	}
	return c.Context.Value(key)
}

// FromContext returns the innermost lock that the handler, or the function given to Do, runs under. ok is false when it
// runs without one.
func FromContext(ctx context.Context) (k *Lock, ok bool) {
	k, ok = ctx.Value(lockContextKey{}).(*Lock)
	return k, ok
}

// locksAround yields the locks that ctx is under, innermost first.
func locksAround(ctx context.Context) iter.Seq[*Lock] {
	return func(yield func(*Lock) bool) {
		for k, _ := FromContext(ctx); k != nil && yield(k); k = k.outer {
		}
	}
}

// nested reports whether the lock of this key is held further up the call chain, so that the task is already safe. It fails
// where the outer lock does not do what this Locker's options promise.
func (l *Locker) nested(ctx context.Context, key string) (bool, error) {
	for k := range locksAround(ctx) {
		if k.key != key || !k.locker.store.Same(l.store) || k.isReleased() {
			continue
		}
		if o := k.locker; o.ttl != l.ttl || o.doneFor != l.doneFor || o.grace != l.grace || o.fencing != l.fencing || o.failOpen != l.failOpen {
			return false, fmt.Errorf("redislock: acquire lock %s: already held further up the call chain, with another TTL, "+
				"done-for, grace period, fencing or fail-open", key)
		}
		if _, ended := k.validity(); ended != nil {
			return false, fmt.Errorf("redislock: acquire lock %s: held further up the call chain and no longer valid: %w", key, ended)
		}
		return true, nil
	}
	return false, nil
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
		sameType := k.self.TaskType == self.TaskType || k.self.TaskType == "" // Do does not know it
		if sameType && k.self.TaskID == self.TaskID && k.self.Queue == self.Queue {
			k.unrun.Store(true)
		}
	}
}

package redislock

import (
	"context"
	"fmt"
	"time"
)

// watchdog keeps a lock alive. It is timers only: a goroutine exists while one of them has fired and a call is in flight.
// The lock's mutex guards it.
type watchdog struct {
	extend   *time.Timer // the next extension
	deadline *time.Timer // the end of validity; no call to Redis can hold it up
	grace    *time.Timer // runs when the context of the work has ended
	unwatch  func() bool // stops watching that context
}

func (w *watchdog) stop() {
	for _, t := range []*time.Timer{w.extend, w.deadline, w.grace} {
		if t != nil {
			t.Stop()
		}
	}
	if w.unwatch != nil {
		w.unwatch()
	}
}

// watch starts the watchdog of a lock that has been valid since validFrom and whose work ends with parent.
func (k *Lock) watch(parent context.Context, validFrom time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.state != stateHeld {
		return // Shutdown was quicker
	}
	k.watchdog.extend = k.locker.after(time.Until(validFrom.Add(k.locker.ttl/3)), k.tick)
	k.watchdog.deadline = k.locker.after(time.Until(k.validUntil), k.expire)
	k.watchdog.unwatch = context.AfterFunc(parent, func() { k.outlive(context.Cause(parent)) })
}

// tick extends the lock. The next tick is set before the call, since a call that hangs must not keep the next from trying
// another connection.
func (k *Lock) tick() {
	if _, ended := k.validity(); ended != nil {
		return
	}
	k.setTick(k.locker.ttl / 3)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(k.ctx), k.locker.ttl)
	defer cancel()
	if k.extend(ctx) != nil {
		k.setTick(retryInterval(k.locker.ttl))
	}
}

func (k *Lock) setTick(d time.Duration) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.state == stateHeld {
		k.watchdog.extend.Reset(d)
	}
}

// renew moves the end of validity after Redis has confirmed an extension that was sent at sent. Once lost, always lost: a
// confirmation that comes too late changes nothing.
func (k *Lock) renew(sent time.Time) error {
	if _, ended := k.validity(); ended != nil {
		return ended
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if until := k.locker.validUntil(sent); k.state == stateHeld && until.After(k.validUntil) {
		k.validUntil = until
		k.watchdog.deadline.Reset(time.Until(until))
		k.watchdog.extend.Reset(time.Until(sent.Add(k.locker.ttl / 3)))
	}
	return nil
}

// expire fires at the end of validity. An extension may have moved that in the same moment.
func (k *Lock) expire() { _, _ = k.validity() }

// outlive keeps the lock for work that goes on after its context has ended, but not for ever.
func (k *Lock) outlive(cause error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.state != stateHeld {
		return
	}
	k.watchdog.grace = k.locker.after(k.locker.grace, func() {
		k.abandon(fmt.Errorf("redislock: lock %s: the work still runs %v after its context ended: %w", k.key, k.locker.grace, cause))
	})
}

// after is time.AfterFunc for what Shutdown waits for.
func (l *Locker) after(d time.Duration, fn func()) *time.Timer {
	return time.AfterFunc(d, func() {
		l.begin()
		defer l.leave()
		fn()
	})
}

// retryInterval is the pause after a call that failed.
func retryInterval(ttl time.Duration) time.Duration { return max(ttl/30, 50*time.Millisecond) }

// waitFor waits until done is closed, or ctx ends, and reports whether it is done.
func waitFor(ctx context.Context, done <-chan struct{}) bool {
	select {
	case <-done:
		return true
	case <-ctx.Done():
	}
	select { // at the same moment, done counts
	case <-done:
		return true
	default:
		return false
	}
}

// sleep waits for d, or less if ctx ends first, and reports whether it waited to the end.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

package redislock

import (
	"context"
	"fmt"
	"slices"
	"time"

	"example.com/redislock/internal/store"
)

// watchdog keeps a lock alive. A goroutine exists only while its alarm goes off or a call is in flight. The lock's mutex guards
// it.
type watchdog struct {
	alarm   alarm       // for the next extension or the end of validity; no call to Redis can hold it up
	doubt   bool        // the last one has not been confirmed
	grace   *time.Timer // runs when the context of the work has ended
	unwatch func() bool // stops watching that context
}

func (k *Lock) stopWatchdog() {
	k.locker.alarms.remove(k)
	if k.watchdog.grace != nil {
		k.watchdog.grace.Stop()
	}
	if k.watchdog.unwatch != nil {
		k.watchdog.unwatch()
	}
}

// watch starts the watchdog of a lock whose work ends with parent.
func (k *Lock) watch(parent context.Context) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.state != stateHeld {
		return // Shutdown was quicker
	}
	k.setNext(k.claim.Sent.Add(k.locker.ttl / 3))
	if parent.Done() != nil {
		k.watchdog.unwatch = context.AfterFunc(parent, func() { k.outlive(context.Cause(parent)) })
	}
}

// setNext sets the time of the next extension, with the mutex held.
func (k *Lock) setNext(next time.Time) {
	if k.state != stateHeld {
		return
	}
	if k.validUntil.Before(next) {
		next = k.validUntil
	}
	k.locker.alarms.set(k, next, k.watchdog.doubt)
}

// together is how many locks are extended in one round trip, if a Locker has as many.
const together = 100

// awake extends the locks whose time has come, or notices that their validity has ended.
func (l *Locker) awake() {
	l.begin()
	defer l.leave()
	now := time.Now()
	soon := now
	many := l.bulk != nil && l.alarms.len() >= together
	if many {
		soon = now.Add(l.ttl / 60)
	}
	var due []*Lock
	for _, k := range l.alarms.take(now, soon) {
		switch k.wake(now) {
		case wakeToEnd:
			l.spawn(func() { _, _ = k.validity() })
		case wakeToExtend:
			if many {
				due = append(due, k)
				continue
			}
			fallthrough
		case wakeInDoubt: // what holds up the last call must not hold up others
			l.spawn(k.extendAlone)
		}
	}
	for some := range slices.Chunk(due, together) {
		l.spawn(func() { l.extendTogether(some) })
	}
}

// What a lock is woken for.
const (
	wakeNoMore = iota
	wakeToExtend
	wakeInDoubt
	wakeToEnd
)

// wake says what it is time for, and sets the next alarm: before the call, since a call that hangs must neither keep the next
// from trying another connection nor hide the end of validity.
func (k *Lock) wake(now time.Time) (what int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case k.state != stateHeld:
		return wakeNoMore
	case !now.Before(k.validUntil):
		return wakeToEnd
	case k.watchdog.doubt:
		what = wakeInDoubt
	default:
		what = wakeToExtend
	}
	k.watchdog.doubt = true
	k.setNext(now.Add(k.locker.ttl / 3))
	return what
}

// extendAlone extends one lock in a call of its own.
func (k *Lock) extendAlone() {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(k.ctx), k.locker.ttl)
	defer cancel()
	if k.extend(ctx) != nil {
		k.tryAgain()
	}
}

// extendTogether extends many locks in one round trip.
func (l *Locker) extendTogether(locks []*Lock) {
	leases := make([]store.Lease, len(locks))
	for i, k := range locks {
		leases[i] = k.claim.Lease
	}
	sent := time.Now()
	for i, err := range l.bulk.ExtendAll(leases, sent.Add(l.ttl)) {
		if k := locks[i]; err == nil {
			_ = k.renew(sent)
		} else {
			l.spawn(func() { // an observer must not hold up the others
				if k.extended(sent, err) != nil {
					k.tryAgain()
				}
			})
		}
	}
}

// tryAgain sets the next extension after one that failed.
func (k *Lock) tryAgain() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.setNext(time.Now().Add(retryInterval(k.locker.ttl)))
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
		k.validUntil, k.watchdog.doubt = until, false
		k.setNext(sent.Add(k.locker.ttl / 3))
	}
	return nil
}

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

// startTimer and stopTimer are time.NewTimer and Stop with timers that are used again.
func (l *Locker) startTimer(d time.Duration) *time.Timer {
	if t, ok := l.timers.Get().(*time.Timer); ok {
		t.Reset(d)
		return t
	}
	return time.NewTimer(d)
}

func (l *Locker) stopTimer(t *time.Timer) {
	t.Stop()
	l.timers.Put(t)
}

// await waits until done is closed or the time has come.
func (l *Locker) await(done <-chan struct{}, until time.Time) {
	select {
	case <-done:
		return
	default:
	}
	timer := l.startTimer(time.Until(until))
	defer l.stopTimer(timer)
	select {
	case <-done:
	case <-timer.C:
	}
}

// retryInterval is the pause after a call that failed.
func retryInterval(ttl time.Duration) time.Duration { return max(ttl/30, 50*time.Millisecond) }

// closed is for those who need not wait any more.
var closed = make(chan struct{})

func init() { close(closed) }

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

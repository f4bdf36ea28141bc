package redislock

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
)

// The algorithm is the single-instance lock of the Redis documentation (SET NX PX with a random token, compare-and-delete
// in Lua), with a lease that is extended and a validity that is kept by the local monotonic clock.

//go:embed script/acquire.lua
var acquireSource string

//go:embed script/extend.lua
var extendSource string

//go:embed script/release.lua
var releaseSource string

//go:embed script/done.lua
var doneSource string

var (
	acquireScript = redis.NewScript(acquireSource)
	extendScript  = redis.NewScript(extendSource)
	releaseScript = redis.NewScript(releaseSource)
	doneScript    = redis.NewScript(doneSource)
)

// What extend, release and done answer.
const (
	replyOurs    = 1
	replyAnother = -1 // 0, from release and extend: nobody's
)

// fenceLifetime is how long a fence counter is kept after the last acquire. Redis's clock takes over from there.
const fenceLifetime = 24 * time.Hour

// Lock is a lock that was acquired. It is extended in the background until it is released, lost or abandoned, and then stays
// so for ever. All methods are safe for concurrent use.
type Lock struct {
	locker *Locker
	key    string
	token  string
	value  string // what is at the key while it is ours
	fence  int64  // 0 without WithFencing
	self   Holder
	since  time.Time // acquired
	waited time.Duration
	ctx    context.Context
	cancel context.CancelCauseFunc
	outer  *Lock       // the lock around this one in its call chain
	unrun  atomic.Bool // a lock further down the chain kept the task from running

	mu         sync.Mutex
	state      lockState
	cause      error         // why it is lost or abandoned
	told       chan struct{} // made with the cause, closed when the event about it is told
	held       time.Duration // until it ended
	validUntil time.Time
	watchdog   watchdog
	releasing  atomic.Bool
	booked     atomic.Bool   // how the release came out is told
	released   chan struct{} // closed when the first release is over
	releaseErr error         // readable once released is closed
}

type lockState int

const (
	stateHeld lockState = iota
	stateReleased
	stateLost
	stateAbandoned
)

// Key returns the Redis key of the lock.
func (k *Lock) Key() string { return k.key }

// Context returns a context that ends when the lock does: released (context.Canceled) or lost (context.Cause matches ErrLost),
// or when Shutdown lost patience with it (ErrClosed). A handler's lock also passes on the end of the task's context.
func (k *Lock) Context() context.Context { return k.ctx }

// Fence returns the lock's fencing number, which is higher than that of every earlier lock of its key: hand it to what the
// handler writes to, so that it can refuse a lower one. ok is false without WithFencing.
func (k *Lock) Fence() (n int64, ok bool) { return k.fence, k.fence > 0 }

// Check asks Redis whether the lock is still held, and extends it. Call it before a side effect that must not happen twice.
// It returns nil, or an error that matches ErrLost when the lock has ended in any way, or ErrUnavailable when Redis gave no
// answer before ctx ended; the lock may then still be held, and its Context tells when no longer.
func (k *Lock) Check(ctx context.Context) error {
	validity, err := k.validity()
	if err != nil {
		return err
	}
	bound, cancel := context.WithTimeout(ctx, validity)
	defer cancel()
	replies := make(chan error, 1)
	k.locker.spawn(func() { replies <- k.extend(bound) })
	select {
	case err = <-replies:
	case <-bound.Done():
		err = fmt.Errorf("%w: check lock %s: %w", ErrUnavailable, k.key, bound.Err())
	}
	if _, ended := k.validity(); ended != nil {
		return ended
	}
	return err
}

// Release ends the lock and its Context and frees the key, if it is still ours, without leaving a done marker. It waits for
// the reply at most until ctx ends, with a context that ends with the lock at most min(2 s, TTL/10); the call goes on without
// it. Calls after the first change nothing and return the same result. The error matches ErrLost when the lock was lost before,
// ErrUnavailable when Redis could not be asked, so that the key lapses within one TTL, or when the result was not awaited, which
// a later call returns. What Redis refuses (no permission, say) is an error with its text.
func (k *Lock) Release(ctx context.Context) error {
	bound, cancel := k.releaseBound(ctx)
	defer cancel()
	if !waitFor(bound, k.release(false)) {
		return fmt.Errorf("%w: release lock %s: %w", ErrUnavailable, k.key, bound.Err())
	}
	return k.releaseErr
}

// releaseBound bounds the wait for a release. A handler's own context cannot: the release itself ends it.
func (k *Lock) releaseBound(ctx context.Context) (context.Context, context.CancelFunc) {
	for around := range locksAround(ctx) {
		if around == k && ctx.Err() == nil {
			until := time.Now().Add(k.locker.patience())
			if deadline, ok := ctx.Deadline(); ok && deadline.Before(until) {
				until = deadline
			}
			return context.WithDeadline(context.WithoutCancel(ctx), until)
		}
	}
	return ctx, func() {}
}

// acquire makes one try at the lock of a key, bounded by ctx and TTL/4. The lock's own context derives from parent.
// began is when the wait for it started.
func (l *Locker) acquire(ctx, parent context.Context, key string, self Holder, began time.Time) (*Lock, error) {
	if !l.enter() {
		return nil, fmt.Errorf("%w: acquire lock %s", ErrClosed, key)
	}
	self.Since = time.Now().UTC().Truncate(time.Millisecond) // as it comes back from the value, to be compared
	token := uuid.NewString()
	value := encodeValue(self, token)
	c, err := l.try(ctx, key, value)
	if err != nil {
		l.leave()
		return nil, err
	}
	outer, _ := FromContext(parent)
	k := &Lock{
		locker:     l,
		key:        key,
		token:      token,
		value:      value,
		fence:      c.fence,
		self:       self,
		since:      time.Now(),
		waited:     time.Since(began),
		outer:      outer,
		validUntil: l.validUntil(c.sent),
		released:   make(chan struct{}),
	}
	k.ctx, k.cancel = context.WithCancelCause(context.WithValue(parent, lockContextKey{}, k))
	k.emit(EventAcquired, nil) // first, since a Shutdown that finds it registered may abandon it at once
	if !l.register(k) {
		k.release(false)
		return nil, fmt.Errorf("%w: acquire lock %s", ErrClosed, key)
	}
	k.watch(parent, c.sent)
	return k, nil
}

// claim is a key that was claimed.
type claim struct {
	sent  time.Time // it is valid from then on: before the request was sent
	fence int64
}

// try claims the key for value. Whatever it does not return as claimed it gives back.
func (l *Locker) try(ctx context.Context, key, value string) (claim, error) {
	type reply struct {
		claim
		err error
	}
	began := time.Now()
	bound, cancel := context.WithTimeout(ctx, l.ttl/4)
	defer cancel()
	replies := make(chan reply, 1)
	l.spawn(func() {
		c, err := l.claim(bound, key, value)
		replies <- reply{c, err}
	})
	var r reply
	select {
	case r = <-replies:
	case <-bound.Done():
		// go-redis may not return for a while, and nobody can say what Redis will have done by then.
		l.spawn(func() {
			<-replies
			l.giveBack(key, value)
		})
		return claim{}, l.tooLate(ctx, key)
	}
	switch {
	case r.err == nil && (ctx.Err() != nil || time.Since(began) > l.ttl/4):
		// asynq has settled a task whose context ended, and may have given it to another server.
		l.spawn(func() { l.giveBack(key, value) })
		return claim{}, l.tooLate(ctx, key)
	case errors.Is(r.err, ErrUnavailable):
		l.spawn(func() { l.giveBack(key, value) })
	}
	return r.claim, r.err
}

// claim asks for the key. go-redis resends a command whose reply was lost, so finding our own value means that it is ours; its
// TTL has been running since the first send, hence the extension.
func (l *Locker) claim(ctx context.Context, key, value string) (c claim, err error) {
	set := l.set
	if l.fencing {
		set = l.setFenced
	}
	c.sent = time.Now()
	present, fence, err := set(ctx, key, value)
	switch {
	case errors.Is(err, redis.Nil):
		c.fence = fence
		return c, nil
	case err != nil:
		return c, redisError("acquire lock", key, err)
	case present == value:
		c.sent = time.Now()
		reply, err := extendScript.Run(ctx, l.rdb, []string{key}, value, l.ttl.Milliseconds()).Int()
		if err == nil && reply != replyOurs {
			err = errors.New("it lapsed while its reply was lost")
		}
		if err != nil {
			return c, fmt.Errorf("%w: acquire lock %s: %w", ErrUnavailable, key, err)
		}
		return c, nil
	}
	holder, err := decodeValue(present)
	if errors.Is(err, errForeignValue) {
		return c, fmt.Errorf("redislock: acquire lock %s: %w", key, err)
	}
	return c, &HeldError{Key: key, Holder: holder}
}

// set sets the key to value unless something is there, which it returns; redis.Nil says that it did.
func (l *Locker) set(ctx context.Context, key, value string) (present string, _ int64, err error) {
	set := redis.NewStatusCmd(ctx, "set", key, value, "nx", "get", "px", l.ttl.Milliseconds())
	_ = l.rdb.Process(ctx, set)
	present, err = set.Result()
	return present, 0, err
}

// setFenced is set with a fencing number, by a script that extends what it finds to be ours itself.
func (l *Locker) setFenced(ctx context.Context, key, value string) (present string, fence int64, err error) {
	reply, err := acquireScript.Run(ctx, l.rdb, []string{key, key + ":fence"}, value, l.ttl.Milliseconds(), fenceLifetime.Milliseconds()).Slice()
	if err != nil {
		return "", 0, err
	}
	present, _ = reply[0].(string)
	if present != value {
		return present, 0, nil
	}
	number, _ := reply[1].(string)
	if fence, err = strconv.ParseInt(number, 10, 64); err != nil {
		return "", 0, err
	}
	return "", fence, redis.Nil
}

// tooLate is the error of a try that took longer than its context or than TTL/4.
func (l *Locker) tooLate(ctx context.Context, key string) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%w: acquire lock %s: %w", ErrUnavailable, key, err)
	}
	return fmt.Errorf("%w: acquire lock %s: took longer than %v, a quarter of the TTL", ErrUnavailable, key, l.ttl/4)
}

// giveBack frees what a try without a known outcome may have claimed. If it fails, the key lapses within one TTL. It wakes
// nobody: the one who waits is often the one whose try this was, and has to pause before the next.
func (l *Locker) giveBack(key, value string) {
	ctx, cancel := context.WithTimeout(context.Background(), l.ttl)
	defer cancel()
	_ = releaseScript.Run(ctx, l.rdb, []string{key}, value).Err()
}

// validUntil is when a holder must stop believing in a lock whose TTL was set by a command sent at sent: a tenth of the TTL
// before Redis can give it away, for clocks that run at different speeds and timers that fire late.
func (l *Locker) validUntil(sent time.Time) time.Time { return sent.Add(l.ttl - l.ttl/10) }

// patience is how long a return waits for its release.
func (l *Locker) patience() time.Duration { return min(2*time.Second, l.ttl/10) }

// validity returns how much longer the lock is valid without an extension, or an ErrLost that says how it ended. The local
// clock has the last word: a lock that is overdue is lost even if no timer has said so yet.
func (k *Lock) validity() (time.Duration, error) {
	k.mu.Lock()
	state, cause, left := k.state, k.cause, time.Until(k.validUntil)
	k.mu.Unlock()
	switch {
	case state == stateReleased:
		return 0, fmt.Errorf("%w: lock %s: it has been released", ErrLost, k.key)
	case state == stateAbandoned:
		return 0, fmt.Errorf("%w: lock %s: it has been abandoned: %w", ErrLost, k.key, cause)
	case state == stateHeld && left <= 0:
		return 0, k.lose(fmt.Errorf("%w: lock %s: Redis has not confirmed it in time", ErrLost, k.key))
	case state == stateLost:
		return 0, cause
	}
	return left, nil
}

// extend asks Redis for another TTL. It returns nil, ErrLost, or ErrUnavailable for anything that leaves the lock in doubt.
func (k *Lock) extend(ctx context.Context) error {
	sent := time.Now()
	reply, err := extendScript.Run(ctx, k.locker.rdb, []string{k.key}, k.value, k.locker.ttl.Milliseconds()).Int()
	switch {
	case err == nil && reply == replyOurs:
		return k.renew(sent)
	case err == nil, isWrongType(err):
		return k.lose(fmt.Errorf("%w: lock %s: the key is gone or somebody else's", ErrLost, k.key))
	default:
		return fmt.Errorf("%w: extend lock %s: %w", ErrUnavailable, k.key, err)
	}
}

// hold runs fn under the lock and then ends it, however fn ends: a return, a panic or runtime.Goexit.
func (k *Lock) hold(fn func(context.Context) error) (err error) {
	returned := false
	defer func() {
		lost := k.isLost() // before the release, since only a loss that fn could see is fn's to answer for
		released := k.release(returned && err == nil && k.locker.doneFor > 0 && !k.unrun.Load())
		bound := time.NewTimer(k.locker.patience())
		defer bound.Stop()
		select {
		case <-released:
		case <-bound.C:
		}
		if err != nil && lost != nil && !errors.Is(err, ErrLost) {
			err = &lostError{err, lost}
		}
	}()
	err = fn(k.ctx)
	returned = true
	return err
}

// release ends the lock once and frees its key in the background. The channel it returns is closed when that is over.
func (k *Lock) release(done bool) <-chan struct{} {
	if !k.releasing.CompareAndSwap(false, true) {
		return k.released
	}
	_, ended := k.validity()
	held := ended == nil && k.end(stateReleased, context.Canceled)
	k.locker.spawn(func() {
		reply, err := k.settle(done)
		switch {
		case !held:
			_, k.releaseErr = k.validity()
			<-k.told
		case err != nil:
			k.releaseErr = err
			k.book(EventReleased, err)
		case reply == replyAnother: // or freed by a try whose reply was lost, and taken since; a loss is the safer guess
			k.releaseErr = fmt.Errorf("%w: lock %s: somebody else's at its release", ErrLost, k.key)
			k.book(EventLost, k.releaseErr)
		default: // gone while we were valid: an earlier try freed it and its reply was lost
			k.book(EventReleased, nil)
		}
		l := k.locker
		l.mu.Lock()
		delete(l.locks, k)
		l.mu.Unlock()
		l.wake(k.key)
		l.leave() // from acquire
		close(k.released)
	})
	return k.released
}

// settle frees the key or replaces it by the done marker, and tries again while the key can still be ours.
func (k *Lock) settle(done bool) (reply int, err error) {
	l := k.locker
	ctx, cancel := context.WithTimeout(context.WithoutCancel(k.ctx), l.ttl)
	defer cancel()
	script, args := releaseScript, []any{k.value}
	if done {
		marker := k.self
		marker.Since, marker.Done = time.Now(), true
		script, args = doneScript, append(args, encodeValue(marker, k.token), l.doneFor.Milliseconds())
	}
	for {
		reply, err = script.Run(ctx, l.rdb, []string{k.key}, args...).Int()
		switch {
		case err == nil:
			return reply, nil
		case isWrongType(err):
			return replyAnother, nil
		}
		err = redisError("release lock", k.key, err)
		if !errors.Is(err, ErrUnavailable) || errors.Is(err, redis.ErrClosed) || !sleep(ctx, l.retryInterval()) {
			return 0, err
		}
	}
}

// end moves the lock out of the held state, stops its timers and cancels its context. It reports whether it was the one
// to do so.
func (k *Lock) end(state lockState, cause error) bool {
	k.mu.Lock()
	first := k.state == stateHeld
	if first {
		k.state, k.held = state, time.Since(k.since)
		if state != stateReleased {
			k.cause, k.told = cause, make(chan struct{})
		}
		k.watchdog.stop()
	}
	k.mu.Unlock()
	if first {
		k.cancel(cause)
	}
	return first
}

// lose declares the lock lost. It returns why the lock has ended, which is the given cause if it was the first.
func (k *Lock) lose(cause error) error {
	if k.end(stateLost, cause) {
		k.emit(EventLost, cause) // after the handler knows, for which no observer may be too slow
		close(k.told)
	}
	_, ended := k.validity()
	return ended
}

// abandon stops extending the lock while its work goes on, so that the key lapses within one TTL.
func (k *Lock) abandon(cause error) {
	if k.end(stateAbandoned, cause) {
		k.emit(EventAbandoned, cause)
		close(k.told)
	}
}

// giveUp is what becomes of a lock when Shutdown stops waiting: abandoned if its work still runs, released without
// confirmation if only Redis's reply is missing.
func (k *Lock) giveUp(cause error) {
	k.abandon(cause)
	if k.isReleased() {
		k.book(EventReleased, cause)
	}
}

// book tells how a release came out, once: its reply may come after Shutdown has stopped waiting for it.
func (k *Lock) book(kind EventKind, err error) {
	if k.booked.CompareAndSwap(false, true) {
		k.emit(kind, err)
	}
}

// isLost returns why the lock was lost, nil if it was not.
func (k *Lock) isLost() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.state != stateLost {
		return nil
	}
	return k.cause
}

func (k *Lock) isReleased() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.state == stateReleased
}

// heldFor is how long the lock was held, once it has ended.
func (k *Lock) heldFor() time.Duration {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.held
}

func (k *Lock) emit(kind EventKind, err error) {
	k.locker.emit(k.ctx, Event{
		Kind: kind, Key: k.key, TaskID: k.self.TaskID, TaskType: k.self.TaskType, Queue: k.self.Queue,
		Holder: k.self, Waited: k.waited, Held: k.held, Err: err,
	})
}

// lostError is what a handler returned whose lock was lost: both can be matched, and asynq.SkipRetry in it keeps its meaning.
type lostError struct{ err, lost error }

func (e *lostError) Error() string   { return e.err.Error() + " (" + e.lost.Error() + ")" }
func (e *lostError) Unwrap() []error { return []error{e.err, e.lost} }

// outages are the replies of a Redis that is there but can't serve the command now.
var outages = []string{
	"LOADING ", "BUSY ", "READONLY ", "MASTERDOWN ", "CLUSTERDOWN ", "TRYAGAIN ", "NOREPLICAS ", "OOM ", "MISCONF ",
	"max number of clients", // HasErrorPrefix drops the ERR before it
}

// redisError wraps an error of go-redis: as ErrUnavailable when Redis could not be reached or can't serve now, plainly when
// it refused, since trying again would not help.
func redisError(verb, key string, err error) error {
	var reply redis.Error
	unavailable := !errors.As(err, &reply)
	for _, prefix := range outages {
		unavailable = unavailable || redis.HasErrorPrefix(err, prefix)
	}
	if unavailable {
		return fmt.Errorf("%w: %s %s: %w", ErrUnavailable, verb, key, err)
	}
	return fmt.Errorf("redislock: %s %s: %w", verb, key, err)
}

// isWrongType reports whether something other than a string is at the key. Scripts wrap the reply, so its place varies.
func isWrongType(err error) bool {
	var reply redis.Error
	return errors.As(err, &reply) && strings.Contains(err.Error(), "WRONGTYPE")
}

package redislock

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"example.com/redislock/internal/store"
)

// Lock is a lock that was acquired. It is extended in the background until it is released, lost or abandoned, and then stays
// so for ever. All methods are safe for concurrent use.
type Lock struct {
	locker *Locker
	key    string
	token  uuid.UUID
	claim  store.Claim
	self   Holder
	waited time.Duration
	work   lockContext
	ctx    context.Context // work, and what the store adds
	cancel context.CancelCauseFunc
	outer  *Lock       // the lock around this one in its call chain
	unrun  atomic.Bool // a lock further down the chain kept the task from running
	place  int32       // among the locks of the Locker, whose mutex guards it

	mu         sync.Mutex
	state      lockState
	cause      error         // why it is lost or abandoned
	told       chan struct{} // made with the cause, closed when the event about it is told
	held       time.Duration // until it ended
	validUntil time.Time
	watchdog   watchdog
	releasing  atomic.Bool
	booked     atomic.Bool   // how the release came out is told
	released   chan struct{} // made for the first who waits, closed when the first release is over
	err        error         // of the claim, and then of the release: readable once that is over, like workErr
	workErr    error         // why the work under the lock did not take effect
}

type lockState int

const (
	stateHeld lockState = iota
	stateReleased
	stateLost
	stateAbandoned
)

// Key returns the key of the lock, in Redis or in the table of the row locks.
func (k *Lock) Key() string { return k.key }

// Context returns a context that ends when the lock does: released (context.Canceled) or lost (context.Cause matches ErrLost),
// or when Shutdown lost patience with it (ErrClosed). A handler's lock also passes on the end of the task's context.
func (k *Lock) Context() context.Context { return k.ctx }

// Fence returns the lock's fencing number, which is higher than that of every earlier lock of its key: hand it to what the
// handler writes to, so that it can refuse a lower one. ok is false without WithFencing.
func (k *Lock) Fence() (n int64, ok bool) { return k.claim.Fence, k.claim.Fence > 0 }

// Check asks Redis, or the database of a row lock, whether the lock is still held, and extends it. Call it before a side effect
// that must not happen twice. A row lock whose connection the handler is using (rows open, or after Conn) can't be asked: Check
// then returns nil unless its loss is known already.
// It returns nil, or an error that matches ErrLost when the lock has ended in any way, or ErrUnavailable when there was no
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
// ErrUnavailable when the lock store could not be asked, so that the key lapses within one TTL, or when the result was not awaited, which
// a later call returns. What Redis refuses (no permission, say) is an error with its text.
func (k *Lock) Release(ctx context.Context) error {
	bound, cancel := k.releaseBound(ctx)
	defer cancel()
	if !waitFor(bound, k.release(false)) {
		return fmt.Errorf("%w: release lock %s: %w", ErrUnavailable, k.key, bound.Err())
	}
	return k.err
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
	claimed := false
	defer func() {
		if !claimed { // or a hook of the client's panics
			l.leave()
		}
	}()
	if holder, ok := l.holder(key); ok {
		return nil, &HeldError{Key: key, Holder: holder}
	}
	now := time.Now()
	self.Since = now.UTC().Truncate(time.Millisecond) // as it comes back from the value, to be compared
	k := &Lock{locker: l, key: key, token: uuid.New(), self: self}
	if err := k.try(ctx, now.Add(l.ttl/4)); err != nil {
		return nil, err
	}
	claimed = true
	k.waited = time.Since(began)
	k.validUntil = l.validUntil(k.claim.Sent)
	k.outer, _ = FromContext(parent)
	k.work.lock = k
	k.work.Context, k.cancel = context.WithCancelCause(parent)
	k.ctx = k.claim.Bind(&k.work, (*owner)(k))
	k.emit(EventAcquired, nil) // first, since a Shutdown that finds it registered may abandon it at once
	if !l.register(k) {
		k.release(false)
		return nil, fmt.Errorf("%w: acquire lock %s", ErrClosed, key)
	}
	k.watch(parent)
	return k, nil
}

// try claims the key until then. Whatever it does not return as claimed it gives back, and then nobody else may use the lock.
func (k *Lock) try(ctx context.Context, until time.Time) error {
	l := k.locker
	request := store.Request{Key: k.key, Value: encodeValue(k.self, k.token.String()), TTL: l.ttl, Fencing: l.fencing, Until: until}
	if request.Prompt = l.isPrompt(ctx, until); request.Prompt {
		k.claim, k.err = l.store.Claim(ctx, request)
	} else if !k.claimElsewhere(ctx, request) {
		return k.tooLate(ctx)
	}
	overrun := time.Since(until)
	if request.Prompt {
		l.checkPrompt(overrun)
	}
	late := ctx.Err() != nil || overrun >= 0
	if k.claim.Lease != nil && (late || k.err != nil) {
		// asynq has settled a task whose context ended, and may have given it to another server.
		l.spawn(k.giveBack)
	}
	if k.err == nil && late {
		return k.tooLate(ctx)
	}
	return k.refusal()
}

// claimElsewhere claims the key from another goroutine, since the call may not return for a while. It reports whether it did.
// If not, nobody can say what the store will have done by then, so that goroutine gives the lock back.
func (k *Lock) claimElsewhere(ctx context.Context, request store.Request) bool {
	l := k.locker
	answered := make(chan struct{})
	l.begin()
	go func() {
		defer l.leave()
		k.claim, k.err = l.store.Claim(ctx, request)
		close(answered)
	}()
	timer := l.startTimer(time.Until(request.Until))
	defer l.stopTimer(timer)
	select {
	case <-answered:
		return true
	case <-ctx.Done():
	case <-timer.C:
	}
	l.spawn(func() {
		<-answered
		k.giveBack()
	})
	return false
}

// refusal says who has the key, where that is why it was not claimed.
func (k *Lock) refusal() error {
	if k.err == nil {
		return nil
	}
	var taken *store.Taken
	if !errors.As(k.err, &taken) {
		return k.err
	}
	if taken.Unknown {
		return &HeldError{Key: k.key}
	}
	holder, err := decodeValue(taken.Value)
	if errors.Is(err, errForeignValue) {
		return fmt.Errorf("redislock: acquire lock %s: %w", k.key, err)
	}
	return &HeldError{Key: k.key, Holder: holder}
}

// tooLate is the error of a try that took longer than its context or than TTL/4.
func (k *Lock) tooLate(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%w: acquire lock %s: %w", ErrUnavailable, k.key, err)
	}
	return fmt.Errorf("%w: acquire lock %s: took longer than %v, a quarter of the TTL", ErrUnavailable, k.key, k.locker.ttl/4)
}

// giveBack frees what a try without a known outcome may have claimed. It wakes nobody: the one who waits is often the one
// whose try this was, and has to pause before the next.
func (k *Lock) giveBack() {
	if k.claim.Lease == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), k.locker.ttl)
	defer cancel()
	k.claim.GiveBack(ctx)
}

// validUntil is when a holder must stop believing in a lock whose TTL was set by a command sent at sent: a tenth of the TTL
// before Redis can give it away, for clocks that run at different speeds and timers that fire late.
func (l *Locker) validUntil(sent time.Time) time.Time { return sent.Add(l.ttl - l.ttl/10) }

// patience is how long a return waits for its release.
func (c *config) patience() time.Duration { return min(2*time.Second, c.ttl/10) }

// promptTTL is the shortest TTL whose calls may be made by the goroutine that wants them, if the store has such: with a shorter
// one, patience would cut off replies that are merely slow.
const promptTTL = 10 * time.Second

// isPrompt reports whether a call that is to end by until may be made right here. It cannot be left when ctx ends before.
func (l *Locker) isPrompt(ctx context.Context, until time.Time) bool {
	deadline, ok := ctx.Deadline()
	return l.prompt.Load() && !(ok && deadline.Before(until))
}

// checkPrompt stops trusting a store whose call, over now, was not prompt: a hook or a connection of the user's has held it up.
func (l *Locker) checkPrompt(overrun time.Duration) {
	if overrun > 2*l.patience() {
		l.prompt.Store(false)
	}
}

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
		return 0, k.lose(fmt.Errorf("%w: lock %s: %s has not confirmed it in time", ErrLost, k.key, k.locker.store.Name()))
	case state == stateLost:
		return 0, cause
	}
	return left, nil
}

// extend asks for another TTL. It returns nil, ErrLost, or ErrUnavailable for anything that leaves the lock in doubt.
func (k *Lock) extend(ctx context.Context) error {
	sent := time.Now()
	return k.extended(sent, k.claim.Extend(ctx))
}

// extended takes the answer to an extension that was sent at sent.
func (k *Lock) extended(sent time.Time, err error) error {
	if err == nil {
		return k.renew(sent)
	}
	if gone, ok := isGone(err); ok {
		return k.loseTo(gone)
	}
	return fmt.Errorf("%w: extend lock %s: %w", ErrUnavailable, k.key, err)
}

// loseTo declares the lock lost for what the store said.
func (k *Lock) loseTo(why store.Gone) error {
	return k.lose(fmt.Errorf("%w: lock %s: %w", ErrLost, k.key, why))
}

// owner is what the store sees of a lock.
type owner Lock

// Lose takes the store's word that the lock is lost.
func (o *owner) Lose(why store.Gone) { _ = (*Lock)(o).loseTo(why) }

// Ended returns why the lock has ended, nil while it has not.
func (o *owner) Ended() error {
	_, ended := (*Lock)(o).validity()
	return ended
}

// hold runs fn under the lock and then ends it, however fn ends: a return, a panic or runtime.Goexit.
func (k *Lock) hold(fn func(context.Context) error) (err error) {
	returned := false
	defer func() {
		lost := k.isLost() // before the release, since only a loss that fn could see is fn's to answer for
		succeeded := returned && err == nil
		until := time.Now().Add(k.locker.patience())
		released := k.releaseBy(until, succeeded)
		if k.locker.store.Transactional() {
			<-released // what fn has done is not done before
			if succeeded {
				err = k.workErr
			}
		} else {
			k.locker.await(released, until)
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
func (k *Lock) release(succeeded bool) <-chan struct{} {
	if held, first := k.retire(); first {
		k.freeElsewhere(k.endOf(succeeded, held))
	}
	return k.done()
}

// releaseBy is release with its first try in the caller's goroutine, which saves waking another, where the store is prompt.
func (k *Lock) releaseBy(until time.Time, succeeded bool) <-chan struct{} {
	if !k.locker.promptRelease || !k.locker.prompt.Load() {
		return k.release(succeeded)
	}
	held, first := k.retire()
	if !first {
		return k.done()
	}
	end := k.endOf(succeeded, held)
	if !held { // whoever is being told of that may take his time
		k.freeElsewhere(end)
		return k.done()
	}
	end.Until, end.Prompt = until, true
	freed := false
	defer func() {
		if !freed { // or a hook of the client's panics
			k.freeElsewhere(end)
		}
	}()
	work, err := k.claim.Release(k.ctx, end)
	k.locker.checkPrompt(time.Since(until))
	if freed = !errors.Is(err, ErrUnavailable); freed {
		k.finish(end, work, err)
	}
	return k.done()
}

// done returns a channel that is closed when the first release is over.
func (k *Lock) done() <-chan struct{} {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.released == nil {
		k.released = make(chan struct{})
	}
	return k.released
}

// retire makes the lock a released one. It reports whether it was held until now, and whether this is its first release.
func (k *Lock) retire() (held, first bool) {
	if !k.releasing.CompareAndSwap(false, true) {
		return false, false
	}
	_, ended := k.validity()
	return ended == nil && k.end(stateReleased, context.Canceled), true
}

// freeElsewhere frees the key in the background.
func (k *Lock) freeElsewhere(end store.End) {
	l := k.locker
	end.Until, end.Prompt = time.Now().Add(l.ttl), false
	l.begin()
	go func() {
		defer l.leave()
		work, err := k.claim.Release(k.ctx, end)
		k.finish(end, work, err)
	}()
}

// finish tells how freeing the key came out.
func (k *Lock) finish(end store.End, work, err error) {
	k.workErr = work
	gone, lost := isGone(err)
	switch {
	case !end.Held:
		_, k.err = k.validity()
		if end.Succeeded && k.locker.store.Transactional() {
			k.workErr = k.err
		}
		<-k.told
	case lost:
		k.err = fmt.Errorf("%w: lock %s: %w", ErrLost, k.key, gone)
		k.book(EventLost, k.err)
	default:
		k.err = err
		k.book(EventReleased, err)
	}
	k.locker.unregister(k)
	k.locker.leave() // from acquire
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.released == nil {
		k.released = closed
	} else {
		close(k.released)
	}
}

// isGone returns what the store said of a lease that has ended.
func isGone(err error) (store.Gone, bool) {
	if err == nil { // what errors.As is given takes an allocation
		return "", false
	}
	var gone store.Gone
	ok := errors.As(err, &gone)
	return gone, ok
}

// endOf says how to free the key: leaving a done marker where the work succeeded and WithDoneFor wants one.
func (k *Lock) endOf(succeeded, held bool) store.End {
	end := store.End{Succeeded: succeeded, Held: held, DoneFor: k.locker.doneFor}
	if succeeded && end.DoneFor > 0 && !k.unrun.Load() {
		marker := k.self
		marker.Since, marker.Done = time.Now(), true
		end.Marker = encodeValue(marker, k.token.String())
	}
	return end
}

// end moves the lock out of the held state, stops its timers and cancels its context. It reports whether it was the one
// to do so.
func (k *Lock) end(state lockState, cause error) bool {
	k.mu.Lock()
	first := k.state == stateHeld
	if first {
		k.state, k.held = state, time.Since(k.claim.Sent)
		if state != stateReleased {
			k.cause, k.told = cause, make(chan struct{})
		}
		k.stopWatchdog()
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

// isValid reports whether the lock is held, as far as the local clock can tell.
func (k *Lock) isValid() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.state == stateHeld && time.Now().Before(k.validUntil)
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
	k.locker.emit(k.ctx, &Event{
		Kind: kind, Key: k.key, TaskID: k.self.TaskID, TaskType: k.self.TaskType, Queue: k.self.Queue,
		Holder: k.self, Waited: k.waited, Held: k.held, Err: err,
	})
}

// lostError is what a handler returned whose lock was lost: both can be matched, and asynq.SkipRetry in it keeps its meaning.
type lostError struct{ err, lost error }

func (e *lostError) Error() string   { return e.err.Error() + " (" + e.lost.Error() + ")" }
func (e *lostError) Unwrap() []error { return []error{e.err, e.lost} }

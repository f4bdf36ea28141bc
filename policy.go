package redislock

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"time"

	"github.com/hibiken/asynq"
)

// Policy says what happens to a task whose lock another task holds. It has no say in the rest: a task whose work is done is
// dropped, and a second delivery of the very task that holds the lock is put back, since its first run may still be alive or
// may just have been killed. The zero Policy is the default, see WithPolicy.
type Policy struct {
	kind   policyKind
	d      time.Duration
	decide func(context.Context, *asynq.Task, *HeldError) error
}

type policyKind int

const (
	policyDefault policyKind = iota
	policySkip
	policyRetry
	policyWait
	policyArchive
	policyFunc
)

// Skip drops the task: asynq sees a success. Its price: when the holder fails for good, or its host dies and asynq cannot
// retry it, the copies that were dropped meanwhile are gone as well. And it believes the key, which outlives its holder by up
// to one TTL where that was killed, or could not reach Redis to release it.
func Skip() Policy { return Policy{kind: policySkip} }

// Retry puts the task back for delay, give or take a fifth, at least 1 s. 0 means half the TTL; not negative. On a server
// configured by ServerConfig this never counts as a failure and uses up none of the task's retries.
func Retry(delay time.Duration) Policy { return Policy{kind: policyRetry, d: delay} }

// Wait keeps the task in its worker slot until the lock is free, at most for limit and not up to the task's own deadline, and
// then does as Retry(0). One task per key waits in a Locker, of which a process should have one; the others are put back at
// once, so that waiters cannot fill the worker. Not negative.
func Wait(limit time.Duration) Policy { return Policy{kind: policyWait, d: limit} }

// Archive moves the task to asynq's archive, for somebody to look at. asynq keeps only the newest 10,000 archived tasks of
// a queue.
func Archive() Policy { return Policy{kind: policyArchive} }

// PolicyFunc lets decide choose. nil, like asynq.RevokeTask, drops the task as Skip does; an error that matches ErrHeld puts
// it back as Retry does, after the RetryIn of a *HeldError in it; one that matches asynq.SkipRetry archives it; any other is
// an ordinary failure. While a task waits on its last attempt, decide is asked again when the holder changes. Not nil; must be
// safe for concurrent use.
func PolicyFunc(decide func(ctx context.Context, task *asynq.Task, held *HeldError) error) Policy {
	return Policy{kind: policyFunc, decide: decide}
}

func (p Policy) check() error {
	switch {
	case p.d < 0:
		return fmt.Errorf("redislock: configure WithPolicy: %v: want a duration of 0 or more", p.d)
	case p.kind == policyFunc && p.decide == nil:
		return errors.New("redislock: configure WithPolicy: the function given to PolicyFunc is nil")
	}
	return nil
}

// verdict is what becomes of a task that did not get its lock at a try.
type verdict struct {
	kind   EventKind // EventRan without a lock: run it unlocked
	err    error     // what asynq gets to see, or why it runs unlocked
	holder Holder    // who stands in the way
	wait   waitKind
}

type waitKind int

const (
	waitNot     waitKind = iota
	waitAtLast           // in place, if this is the last attempt
	waitPolicy           // in place, as Wait says
	waitForever          // in place, if this is the last attempt, and until the context ends
)

// obtain takes the lock for a task, waiting in place as far as the policy and the last-attempt rule want it. Without a
// lock, the verdict says what to do instead.
func (l *Locker) obtain(ctx context.Context, task *asynq.Task, key string, self Holder, began time.Time) (*Lock, verdict) {
	lock, err := l.acquire(ctx, ctx, key, self, began)
	if err != nil {
		return l.contend(ctx, task, key, self, began, err)
	}
	return lock, verdict{kind: EventRan}
}

// contend goes on after a first try that failed. It is a function of its own since asynq starts a goroutine for each task, whose
// stack would otherwise grow for this, too.
func (l *Locker) contend(ctx context.Context, task *asynq.Task, key string, self Holder, began time.Time, err error) (*Lock, verdict) {
	var v verdict
	var freed <-chan struct{}
	stay := stay{locker: l, ctx: ctx, key: key, self: self, began: began}
	defer stay.leave()
	for {
		v = l.judge(ctx, task, self, err, v)
		if v.kind != EventRequeued || !stay.wait(v, freed) {
			break
		}
		freed = stay.bell() // before the try: a lock that ends meanwhile must not be slept through
		var lock *Lock
		if lock, err = l.acquire(ctx, ctx, key, self, began); err == nil {
			return lock, verdict{kind: EventRan}
		}
	}
	var held *HeldError
	switch {
	case v.kind != EventRequeued:
	case ctx.Err() != nil:
		v.err = contended(task, fmt.Errorf("redislock: acquire lock %s: the task's context ended: %w", key, context.Cause(ctx)), 0)
	case lastAttempt(ctx):
		v.kind = EventArchived // by asynq, which looks at the attempts before it looks at the error
		if errors.As(v.err, &held) {
			held.RetryIn = 0
		}
	}
	return nil, v
}

// judge finds the verdict for the error of a failed acquire: the table of what a task gets that finds its lock taken.
// before is the verdict of the try before this one, if any.
func (l *Locker) judge(ctx context.Context, task *asynq.Task, self Holder, err error, before verdict) verdict {
	var held *HeldError
	switch {
	case ctx.Err() != nil:
		return verdict{kind: EventRequeued, err: err}
	case errors.Is(err, ErrDone):
		errors.As(err, &held)
		return verdict{kind: EventDone, holder: held.Holder}
	case errors.As(err, &held) && heldAround(ctx, held):
		return verdict{kind: EventRefused, holder: held.Holder,
			err: fmt.Errorf("redislock: acquire lock %s: already held further up the call chain, through another client", held.Key)}
	case errors.As(err, &held):
		held.RetryIn = l.retryDelay(0)
		if held.Holder == (Holder{}) || held.Holder.sameTask(self) {
			return verdict{kind: EventRequeued, err: contended(task, held, held.RetryIn), holder: held.Holder, wait: waitAtLast}
		}
		if l.policy.kind == policyFunc && before.kind == EventRequeued && before.holder == held.Holder {
			return before
		}
		return l.applyPolicy(ctx, task, held)
	case errors.Is(err, ErrUnavailable) && l.failOpen && l.enter():
		return verdict{kind: EventRan, err: err}
	case errors.Is(err, ErrClosed), errors.Is(err, ErrUnavailable) && l.closed():
		return verdict{kind: EventRequeued, err: contended(task, err, l.policyDelay()), wait: waitForever}
	case errors.Is(err, ErrUnavailable):
		return verdict{kind: EventRequeued, err: contended(task, err, l.policyDelay()), wait: waitAtLast}
	}
	return verdict{kind: EventRefused, err: err}
}

// applyPolicy is for a task whose lock another task holds.
func (l *Locker) applyPolicy(ctx context.Context, task *asynq.Task, held *HeldError) verdict {
	v := verdict{holder: held.Holder}
	switch l.policy.kind {
	case policySkip:
		v.kind = EventSkipped
	case policyArchive:
		held.RetryIn = 0
		v.kind, v.err = EventArchived, fmt.Errorf("%w: %w", held, asynq.SkipRetry)
	case policyWait:
		v.kind, v.err, v.wait = EventRequeued, contended(task, held, held.RetryIn), waitPolicy
	case policyRetry:
		held.RetryIn = l.policyDelay()
		v.kind, v.err, v.wait = EventRequeued, contended(task, held, held.RetryIn), waitAtLast
	case policyFunc:
		v.err = l.policy.decide(ctx, task, held)
		var again *HeldError
		switch {
		case v.err == nil:
			v.kind = EventSkipped
		case errors.Is(v.err, asynq.RevokeTask): // which drops the task for asynq, too
			v.kind = EventSkipped
		case errors.Is(v.err, asynq.SkipRetry):
			v.kind = EventArchived
		case errors.Is(v.err, ErrHeld):
			delay := held.RetryIn
			if errors.As(v.err, &again) {
				delay = again.RetryIn
			}
			v.kind, v.err, v.wait = EventRequeued, contended(task, v.err, delay), waitAtLast
		default:
			v.kind = EventRefused
		}
	}
	return v
}

const minRetry = time.Second

// policyDelay is how long the policy puts a task back for.
func (l *Locker) policyDelay() time.Duration {
	if l.policy.kind == policyRetry {
		return l.retryDelay(l.policy.d)
	}
	return l.retryDelay(0)
}

// retryDelay adds the jitter that keeps twenty copies from coming back together.
func (l *Locker) retryDelay(d time.Duration) time.Duration {
	if d == 0 {
		d = l.ttl / 2
	}
	d = min(d, math.MaxInt64/2) // room for the jitter
	return max(time.Duration(float64(d)*(0.8+0.4*rand.Float64())), minRetry)
}

// lastAttempt reports whether asynq would archive the task for any error.
func lastAttempt(ctx context.Context) bool {
	retried, ok := asynq.GetRetryCount(ctx)
	most, _ := asynq.GetMaxRetry(ctx)
	return ok && retried >= most
}

// waiters is what the tasks share that wait in place for one key in this Locker.
type waiters struct {
	freed chan struct{} // closed, and made anew, when a lock of the key ends here
	tasks int
	taken bool // the one place for a task that waits because the policy is Wait
}

// stay is one task's stay at the lock of its key. It joins the queue when it first waits.
type stay struct {
	*waiters
	locker *Locker
	ctx    context.Context
	key    string
	self   Holder
	began  time.Time
	seated bool // waiters.taken is ours
}

// bell returns what tells that a lock of the key has ended here since the call.
func (s *stay) bell() <-chan struct{} {
	s.locker.mu.Lock()
	defer s.locker.mu.Unlock()
	return s.freed
}

// join enters the queue and returns its bell.
func (s *stay) join() <-chan struct{} {
	l := s.locker
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.waits[s.key] == nil {
		l.waits[s.key] = &waiters{freed: make(chan struct{})}
	}
	s.waiters = l.waits[s.key]
	s.tasks++
	return s.freed
}

// takeSeat reports whether this is the one task that may wait because the policy is Wait.
func (s *stay) takeSeat() bool {
	s.locker.mu.Lock()
	defer s.locker.mu.Unlock()
	if !s.taken {
		s.taken, s.seated = true, true
	}
	return s.seated
}

func (s *stay) leave() {
	if s.waiters == nil {
		return
	}
	s.locker.mu.Lock()
	defer s.locker.mu.Unlock()
	if s.seated {
		s.taken = false
	}
	if s.tasks--; s.tasks == 0 {
		delete(s.locker.waits, s.key)
	}
}

// wake tells those that wait for a key in this Locker to try again at once.
func (l *Locker) wake(key string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ring(key)
}

// ring is wake for who has the mutex.
func (l *Locker) ring(key string) {
	if q := l.waits[key]; q != nil {
		close(q.freed)
		q.freed = make(chan struct{})
	}
}

// wait returns true when it is time for another try, false when the task must not wait any longer.
func (s *stay) wait(v verdict, freed <-chan struct{}) bool {
	last, left := lastAttempt(s.ctx), s.left(v.wait)
	if left <= 0 {
		return false
	}
	first := s.waiters == nil
	if first {
		freed = s.join()
	}
	if v.wait == waitPolicy && !s.takeSeat() && !last {
		return false
	}
	if last && first { // up to its deadline this task gives no other sign of life
		e := Event{Key: s.key, TaskID: s.self.TaskID, TaskType: s.self.TaskType, Queue: s.self.Queue, Holder: v.holder}
		if v.holder == (Holder{}) {
			e.Err = v.err
		}
		s.locker.log().LogAttrs(s.ctx, slog.LevelInfo,
			"redislock: task waits in place: this is its last attempt, an error would archive it", e.attrs()...)
	}
	// A tenth of the time already waited: Redis sees at most a few polls a second of a task that waits long.
	most := min(max(time.Since(s.began)/10, 5*time.Millisecond), 250*time.Millisecond)
	interval, closing := most/2+rand.N(most/2), s.locker.closing
	if v.wait == waitForever {
		interval, freed, closing = left, nil, nil
	}
	timer := time.NewTimer(min(interval, left))
	defer timer.Stop()
	select {
	case <-freed:
	case <-closing:
	case <-timer.C:
		return interval < left
	case <-s.ctx.Done():
		return false
	}
	return true
}

// left is how much longer the task may wait in place: up to the policy's limit or, where an error would archive it, without
// one, but only waitForever beyond the point from which asynq may settle the task itself, which counts as a failure.
func (s *stay) left(kind waitKind) time.Duration {
	left := time.Duration(math.MaxInt64)
	switch last := lastAttempt(s.ctx); {
	case kind == waitPolicy && !last:
		left = s.locker.policy.d - time.Since(s.began)
	case kind == waitNot, !last:
		return 0
	}
	if deadline, ok := s.ctx.Deadline(); ok && kind != waitForever {
		left = min(left, time.Until(deadline)-max(time.Second, deadline.Sub(s.began)/20))
	}
	return left
}

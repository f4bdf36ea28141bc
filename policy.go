package redislock

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
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
// retry it, the copies that were dropped meanwhile are gone as well.
func Skip() Policy { return Policy{kind: policySkip} }

// Retry puts the task back for delay, give or take a fifth, at least 1 s. 0 means half the TTL; not negative. On a server
// configured by ServerConfig this never counts as a failure and uses up none of the task's retries.
func Retry(delay time.Duration) Policy { return Policy{kind: policyRetry, d: delay} }

// Wait keeps the task in its worker slot until the lock is free, at most for limit, and then does as Retry(0). One task per
// key waits in a Locker; the others are put back at once, so that waiters cannot fill the worker. Not negative.
func Wait(limit time.Duration) Policy { return Policy{kind: policyWait, d: limit} }

// Archive moves the task to asynq's archive, for somebody to look at. asynq keeps only the newest 10,000 archived tasks of
// a queue.
func Archive() Policy { return Policy{kind: policyArchive} }

// PolicyFunc lets decide choose. nil drops the task as Skip does; an error that matches ErrHeld puts it back as Retry does,
// after the RetryIn of a *HeldError in it; one that matches asynq.SkipRetry archives it; any other is an ordinary failure.
// While a task waits on its last attempt, decide is asked again when the holder changes. Not nil; must be safe for
// concurrent use.
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
	kind   EventKind // EventRan: run it unlocked
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
func (l *Locker) obtain(ctx context.Context, task *asynq.Task, key string) (*Lock, verdict) {
	var (
		self = l.self(ctx, task.Type())
		room = l.waitingRoom(ctx, key)
		v    verdict
	)
	defer room.leave()
	for {
		lock, err := l.acquire(ctx, ctx, key, self)
		if err == nil {
			return lock, verdict{}
		}
		v = l.judge(ctx, task, self, err, v)
		if v.kind != EventRequeued || !room.wait(v) {
			break
		}
	}
	if err := ctx.Err(); err != nil && v.kind == EventRequeued {
		v.err = l.contention(task, fmt.Errorf("redislock: acquire lock %s: the task's context ended: %w", key, context.Cause(ctx)), 0)
	} else if v.kind == EventRequeued && lastAttempt(ctx) {
		v.kind = EventArchived // by asynq, which looks at the attempts before it looks at the error
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
	case errors.As(err, &held):
		held.RetryIn = l.retryDelay(0)
		if held.Holder == (Holder{}) || held.Holder.sameTask(self) {
			return verdict{kind: EventRequeued, err: l.contention(task, held, held.RetryIn), holder: held.Holder, wait: waitAtLast}
		}
		if l.policy.kind == policyFunc && before.kind == EventRequeued && before.holder == held.Holder {
			return before
		}
		return l.applyPolicy(ctx, task, held)
	case errors.Is(err, ErrClosed):
		return verdict{kind: EventRequeued, err: l.contention(task, err, l.policyDelay()), wait: waitForever}
	case errors.Is(err, ErrUnavailable):
		if l.failOpen {
			return verdict{kind: EventRan, err: err}
		}
		return verdict{kind: EventRequeued, err: l.contention(task, err, l.policyDelay()), wait: waitAtLast}
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
		v.kind, v.err, v.wait = EventRequeued, l.contention(task, held, held.RetryIn), waitPolicy
	case policyRetry:
		held.RetryIn = l.policyDelay()
		v.kind, v.err, v.wait = EventRequeued, l.contention(task, held, held.RetryIn), waitAtLast
	case policyFunc:
		v.err = l.policy.decide(ctx, task, held)
		var again *HeldError
		switch {
		case v.err == nil:
			v.kind = EventSkipped
		case errors.Is(v.err, asynq.SkipRetry):
			v.kind = EventArchived
		case errors.Is(v.err, ErrHeld):
			delay := held.RetryIn
			if errors.As(v.err, &again) {
				delay = max(again.RetryIn, minRetry)
			}
			v.kind, v.err, v.wait = EventRequeued, l.contention(task, v.err, delay), waitAtLast
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
	return max(time.Duration(float64(d)*(0.8+0.4*rand.Float64())), minRetry)
}

// lastAttempt reports whether asynq would archive the task for any error.
func lastAttempt(ctx context.Context) bool {
	retried, ok := asynq.GetRetryCount(ctx)
	most, _ := asynq.GetMaxRetry(ctx)
	return ok && retried >= most
}

// waitingFor is what those that wait in place for one key share.
type waitingFor struct {
	freed  chan struct{} // closed, and made anew, when a lock of the key ends in this Locker
	guests int
	taken  bool // by the one that waits because the policy is Wait
}

// waitingRoom is where one task waits for its lock.
type waitingRoom struct {
	locker *Locker
	ctx    context.Context
	key    string
	began  time.Time
	shared *waitingFor // nil until the first wait
	sole   bool        // shared.taken is ours
}

func (l *Locker) waitingRoom(ctx context.Context, key string) *waitingRoom {
	return &waitingRoom{locker: l, ctx: ctx, key: key, began: time.Now()}
}

// wait returns true when it is time for another try, false when the task must not wait any longer.
func (r *waitingRoom) wait(v verdict) bool {
	left, may := r.limit(v.wait)
	if !may || r.ctx.Err() != nil {
		return false
	}
	freed := r.enter(v)
	if v.wait == waitPolicy && !r.sole && !lastAttempt(r.ctx) {
		return false
	}
	if v.wait == waitForever {
		<-r.ctx.Done()
		return false
	}
	interval := r.interval()
	timer := time.NewTimer(min(interval, left))
	defer timer.Stop()
	select {
	case <-freed:
		return true
	case <-r.locker.closing:
		return true
	case <-timer.C:
		return interval < left
	case <-r.ctx.Done():
		return false
	}
}

// limit returns how much longer the task may wait in place, and whether it may at all.
func (r *waitingRoom) limit(kind waitKind) (left time.Duration, may bool) {
	const untilContextEnds = 1<<63 - 1
	if kind != waitNot && lastAttempt(r.ctx) {
		deadline, ok := r.ctx.Deadline()
		if !ok || kind == waitForever {
			return untilContextEnds, true
		}
		margin := max(time.Second, deadline.Sub(r.began)/20)
		left = time.Until(deadline.Add(-margin))
		return left, left > 0
	}
	if kind == waitPolicy {
		left = r.locker.policy.d - time.Since(r.began)
		return left, left > 0
	}
	return 0, false
}

// interval grows with the time already waited, so that a hand-over takes at most a tenth of it, and Redis sees at most a
// few polls a second of a task that waits long.
func (r *waitingRoom) interval() time.Duration {
	most := min(max(time.Since(r.began)/10, 5*time.Millisecond), 250*time.Millisecond)
	return most/2 + rand.N(most/2)
}

// enter joins those that wait for the key and returns what tells that it has been freed here.
func (r *waitingRoom) enter(v verdict) <-chan struct{} {
	l := r.locker
	l.mu.Lock()
	first := r.shared == nil
	if first {
		if l.waits[r.key] == nil {
			l.waits[r.key] = &waitingFor{freed: make(chan struct{})}
		}
		r.shared = l.waits[r.key]
		r.shared.guests++
	}
	if v.wait == waitPolicy && !r.sole && !r.shared.taken {
		r.sole, r.shared.taken = true, true
	}
	freed := r.shared.freed
	l.mu.Unlock()
	if first && lastAttempt(r.ctx) {
		// Up to its deadline this task gives no other sign of life.
		l.log().LogAttrs(r.ctx, slog.LevelInfo, "redislock: task waits in place: this is its last attempt, an error would archive it",
			slog.String("key", r.key), slog.String("holder", v.holder.String()), slog.String("reason", v.err.Error()))
	}
	return freed
}

func (r *waitingRoom) leave() {
	if r.shared == nil {
		return
	}
	l := r.locker
	l.mu.Lock()
	defer l.mu.Unlock()
	if r.sole {
		r.shared.taken = false
	}
	if r.shared.guests--; r.shared.guests == 0 {
		delete(l.waits, r.key)
	}
}

// wake tells those that wait for a key in this Locker to try again at once.
func (l *Locker) wake(key string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if w := l.waits[key]; w != nil {
		close(w.freed)
		w.freed = make(chan struct{})
	}
}

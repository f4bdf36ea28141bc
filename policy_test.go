package redislock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hibiken/asynq"
)

// job is a task whose payload says how long it works.
func job(kind string, d time.Duration) *asynq.Task { return asynq.NewTask(kind, []byte(d.String())) }

// working is the handler of jobs, which notes in runs when they run. It heeds its context.
func working(runs *tally) asynq.Handler {
	return asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
		defer runs.start(task.Type())()
		d, err := time.ParseDuration(string(task.Payload()))
		if err != nil {
			return err
		}
		return busy(ctx, d)
	})
}

// --- What each policy makes of a task whose lock another task holds ---

func TestAPolicyDecidesWhatBecomesOfATaskWhoseLockIsTaken(t *testing.T) {
	for name, c := range map[string]struct {
		policy   Policy
		kind     EventKind
		state    string
		failed   int
		min, max time.Duration // until it is tried again
	}{
		"Skip":       {Skip(), EventSkipped, "gone", 0, 0, 0},
		"Archive":    {Archive(), EventArchived, "archived", 1, 0, 0},
		"Retry(0)":   {Retry(0), EventRequeued, "retry", 0, 24 * time.Second, 36 * time.Second},
		"Retry(5m)":  {Retry(5 * time.Minute), EventRequeued, "retry", 0, 4 * time.Minute, 6 * time.Minute},
		"Retry(1ms)": {Retry(time.Millisecond), EventRequeued, "retry", 0, time.Second, time.Second},
		"Wait(0)":    {Wait(0), EventRequeued, "retry", 0, 24 * time.Second, 36 * time.Second},
		"Policy{}":   {Policy{}, EventRequeued, "retry", 0, 24 * time.Second, 36 * time.Second}, // the default of any WithKey
		"func nil":   {deciding(func(*HeldError) error { return nil }), EventSkipped, "gone", 0, 0, 0},
		"func held":  {deciding(func(held *HeldError) error { return held }), EventRequeued, "retry", 0, 24 * time.Second, 36 * time.Second},
		"func ErrHeld": {deciding(func(*HeldError) error { return fmt.Errorf("later: %w", ErrHeld) }),
			EventRequeued, "retry", 0, 24 * time.Second, 36 * time.Second},
		"func held, in its own time": {deciding(func(held *HeldError) error {
			held.RetryIn = 10 * time.Minute
			return fmt.Errorf("later: %w", held)
		}), EventRequeued, "retry", 0, 10 * time.Minute, 10 * time.Minute},
		"func another held": {deciding(func(*HeldError) error { return &HeldError{RetryIn: -time.Hour} }),
			EventRequeued, "retry", 0, time.Second, time.Second},
		"func SkipRetry": {deciding(func(held *HeldError) error { return fmt.Errorf("%w: %w", held, asynq.SkipRetry) }),
			EventArchived, "archived", 1, 0, 0},
		"func error": {deciding(func(*HeldError) error { return errPrinter }), EventRefused, "retry", 1, time.Hour, time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T, w *world) {
				var b books
				var runs tally
				h := w.host("h")
				h.serve(ServerConfig(asynq.Config{RetryDelayFunc: func(int, error, *asynq.Task) time.Duration { return time.Hour }}),
					h.locker(&b, WithKey(ByType), WithTTL(time.Minute), WithPolicy(c.policy)).Middleware(working(&runs)))
				holder := w.enqueue(job("work", 5*time.Minute))
				w.until(5*time.Second, "holder running", func() bool { return runs.running("work") == 1 })
				rival := w.enqueue(job("work", 0), asynq.MaxRetry(3))
				w.until(5*time.Second, "rival out of the worker", func() bool { return b.count(c.kind) == 1 && w.state(rival) == c.state })

				e := b.of(c.kind)[0]
				if e.TaskID != rival.ID || e.TaskType != "work" || e.Queue != "default" || e.Holder.TaskID != holder.ID || e.Holder.Host == "" {
					t.Errorf("the event does not name the task and its holder: %+v", e)
				}
				if e.Waited > 10*time.Millisecond {
					t.Errorf("it waited for %s", e.Waited)
				}
				now := w.task(rival)
				if now != nil {
					if c.max > 0 { // asynq keeps whole seconds
						if in := time.Until(now.NextProcessAt); in < c.min-2*time.Second || in > c.max {
							t.Errorf("tried again in %s, want %s to %s", in, c.min, c.max)
						}
					}
					if counted := c.kind == EventRefused; (now.Retried != 0) != counted {
						t.Errorf("Retried is %d", now.Retried)
					}
				}
				var held *HeldError
				if errors.As(e.Err, &held) && c.kind == EventRequeued && held.RetryIn > 0 && !strings.Contains(now.LastErr, held.RetryIn.Round(time.Millisecond).String()) {
					t.Errorf("%q does not say that it comes back in %s", now.LastErr, held.RetryIn)
				}
				if failed := w.stats("default").Failed; failed != c.failed {
					t.Errorf("asynq counted %d failures, want %d", failed, c.failed)
				}
				if len(runs.of("work")) != 1 {
					t.Error("the rival ran")
				}
			})
		})
	}
}

// deciding is the policy that asks fn.
func deciding(fn func(*HeldError) error) Policy {
	return PolicyFunc(func(_ context.Context, _ *asynq.Task, held *HeldError) error { return fn(held) })
}

func TestPolicyFuncSeesTheTaskAndTheHolder(t *testing.T) {
	virtual(t, func(t *testing.T, w *world) {
		var b books
		var runs tally
		h := w.host("h")
		var holder, rival *asynq.TaskInfo
		asked := 0
		policy := PolicyFunc(func(ctx context.Context, task *asynq.Task, held *HeldError) error {
			asked++
			id, _ := asynq.GetTaskID(ctx)
			if id != rival.ID || string(task.Payload()) != "0s" || held.Holder.TaskID != holder.ID || held.Key != w.lockKeys()[0] || !errors.Is(held, ErrHeld) {
				t.Errorf("asked about task %s (%s) and %v", id, task.Payload(), held)
			}
			return nil
		})
		h.serve(ServerConfig(asynq.Config{}), h.locker(&b, WithKey(ByType), WithPolicy(policy)).Middleware(working(&runs)))
		holder = w.enqueue(job("work", 10*time.Second))
		w.until(5*time.Second, "holder running", func() bool { return runs.running("work") == 1 })
		rival = w.enqueue(job("work", 0))
		w.until(20*time.Second, "both gone", func() bool { return w.drained() })
		if asked != 1 {
			t.Errorf("asked %d times", asked)
		}
		b.balance(t, 2)
	})
}

func TestJitterKeepsCopiesFromComingBackTogether(t *testing.T) {
	virtual(t, func(t *testing.T, w *world) {
		var b books
		l := w.host("h").locker(&b, WithKey(ByType), WithPolicy(Retry(time.Minute)))
		name, _ := l.Name(t.Context(), job("work", 0))
		k, err := l.TryAcquire(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		var delays []time.Duration
		for range 200 {
			var held *HeldError
			if err := l.Middleware(asynq.NotFoundHandler()).ProcessTask(t.Context(), job("work", 0)); !errors.As(err, &held) {
				t.Fatal(err)
			}
			delays = append(delays, held.RetryIn)
		}
		slices.Sort(delays)
		if delays[0] < 48*time.Second || delays[199] > 72*time.Second {
			t.Errorf("delays from %s to %s, want 48 s to 72 s", delays[0], delays[199])
		}
		if delays[0] > 52*time.Second || delays[199] < 68*time.Second || len(slices.Compact(delays)) < 190 {
			t.Errorf("delays from %s to %s are not spread", delays[0], delays[199])
		}
		if err := k.Release(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// --- Wait ---

// waitedFor are how long a waiter waits for its lock in the tests of the hand-over.
var waitedFor = []time.Duration{30 * time.Millisecond, 300 * time.Millisecond, 1700 * time.Millisecond, 2600 * time.Millisecond, 20 * time.Second}

func TestInsideAProcessAWaiterGetsItsLockAtOnce(t *testing.T) {
	for _, d := range waitedFor {
		t.Run(d.String(), func(t *testing.T) {
			virtual(t, func(t *testing.T, w *world) {
				var b books
				var runs tally
				handler := w.host("h").locker(&b, WithKey(ByType), WithPolicy(Wait(time.Minute))).Middleware(working(&runs))
				w.spawn(func() { _ = handler.ProcessTask(t.Context(), job("work", d+time.Second)) })
				time.Sleep(time.Second)
				if err := handler.ProcessTask(t.Context(), job("work", 0)); err != nil {
					t.Fatal(err)
				}
				time.Sleep(time.Millisecond) // for the holder's goroutine to book what it did
				handOver(t, &runs, 0)
				b.balance(t, 2)
			})
		})
	}
}

// handOver checks that the second of two runs began within bound of the end of the first.
func handOver(t *testing.T, runs *tally, bound time.Duration) {
	t.Helper()
	got := runs.of("work")
	if len(got) != 2 {
		t.Fatalf("%d runs, want 2", len(got))
	}
	if gap := got[1].start.Sub(got[0].end); gap < 0 || gap > bound {
		t.Errorf("the second run began %s after the end of the first, want at most %s", gap, bound)
	}
}

func TestAcrossProcessesAWaiterGetsItsLockWithinATenthOfTheTimeItWaited(t *testing.T) {
	for _, d := range append(waitedFor, 2500*time.Millisecond, 45*time.Second) {
		t.Run(d.String(), func(t *testing.T) {
			virtual(t, func(t *testing.T, w *world) {
				var b books
				var runs tally
				first, second := w.host("first"), w.host("second")
				opts := Options(WithKey(ByType), WithPolicy(Wait(time.Minute)))
				holder, waiter := first.locker(&b, opts).Middleware(working(&runs)), second.locker(&b, opts).Middleware(working(&runs))
				w.spawn(func() { _ = holder.ProcessTask(t.Context(), job("work", d+time.Second)) })
				time.Sleep(time.Second)
				if err := waiter.ProcessTask(t.Context(), job("work", 0)); err != nil {
					t.Fatal(err)
				}
				handOver(t, &runs, min(max(d/10, 5*time.Millisecond), 250*time.Millisecond))
				time.Sleep(time.Millisecond)
				b.balance(t, 2)
			})
		})
	}
}

// The try that is under way when the lock is freed comes back empty-handed, and must not make the waiter miss its call.
func TestInsideAProcessAReleaseWakesAWaiterWhoseTryIsUnderWay(t *testing.T) {
	const trip = 50 * time.Millisecond
	for d := 3 * time.Second; d < 3300*time.Millisecond; d += 11 * time.Millisecond {
		virtual(t, func(t *testing.T, w *world) {
			var b books
			var runs tally
			h := w.host("h")
			h.lockLink.every("SET").delayReply(trip)
			handler := h.locker(&b, WithKey(ByType), WithPolicy(Wait(time.Minute))).Middleware(working(&runs))
			w.spawn(func() { _ = handler.ProcessTask(t.Context(), job("work", d)) })
			time.Sleep(trip + time.Millisecond)
			if err := handler.ProcessTask(t.Context(), job("work", 0)); err != nil {
				t.Fatal(err)
			}
			handOver(t, &runs, 2*trip)
		})
	}
}

// Redis sees many polls from a task that has just come, and few from one that waits long.
func TestAWaiterPollsWithJitterAndEverMoreSeldom(t *testing.T) {
	virtual(t, func(t *testing.T, w *world) {
		var b books
		other, h := w.host("other"), w.host("h")
		holder, l := other.locker(&b), h.locker(&b, WithKey(ByType), WithPolicy(Wait(20*time.Second)))
		name, _ := l.Name(t.Context(), job("work", 0))
		if _, err := holder.TryAcquire(t.Context(), name); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		if err := l.Middleware(asynq.NotFoundHandler()).ProcessTask(t.Context(), job("work", 0)); !errors.Is(err, ErrHeld) {
			t.Fatal(err)
		}
		if waited := time.Since(start); waited != 20*time.Second {
			t.Errorf("waited for %s, want 20 s", waited)
		}
		polls := h.lockLink.sent("SET")
		var late []time.Duration
		for i := 1; i < len(polls)-1; i++ { // the last one comes when the limit does
			interval, waited := polls[i].at.Sub(polls[i-1].at), polls[i-1].at.Sub(start)
			most := min(max(waited/10, 5*time.Millisecond), 250*time.Millisecond)
			if interval < most/2 || interval > most {
				t.Errorf("after %s the next poll came in %s, want %s to %s", waited, interval, most/2, most)
			}
			if most == 250*time.Millisecond {
				late = append(late, interval)
			}
		}
		if len(late) < 50 || slices.Max(late)-slices.Min(late) < 50*time.Millisecond {
			t.Errorf("%d late polls without jitter: %v", len(late), late)
		}
		_ = holder.ForceRelease(t.Context(), name)
		w.until(time.Minute, "lock given up", func() bool { return b.count(EventLost) == 1 })
	})
}

func TestOneTaskPerKeyAndProcessWaitsAndTheOthersArePutBack(t *testing.T) {
	virtual(t, func(t *testing.T, w *world) {
		var runs tally
		var infos []*asynq.TaskInfo
		hosts := map[string]*books{"one": {}, "two": {}}
		for name, b := range hosts {
			h := w.host(name)
			h.serve(ServerConfig(asynq.Config{Concurrency: 20, Queues: map[string]int{name: 1}}),
				h.locker(b, WithKey(ByType), WithTTL(10*time.Second), WithPolicy(Wait(time.Hour))).Middleware(working(&runs)))
		}
		send := func(kind, queue string) {
			infos = append(infos, w.enqueue(job(kind, 3*time.Second), asynq.Queue(queue), asynq.MaxRetry(1)))
		}
		send("red", "one")
		send("blue", "two")
		w.until(5*time.Second, "both held", func() bool { return runs.running("red") == 1 && runs.running("blue") == 1 })
		for range 4 {
			for name := range hosts {
				send("red", name)
				send("blue", name)
			}
		}
		time.Sleep(2 * time.Second)
		// On each host one of each key waits, one works, and all the rest were sent away at once.
		for name, b := range hosts {
			if active := w.stats(name).Active; active != 1+2 {
				t.Errorf("on host %s %d slots are occupied, want 3", name, active)
			}
			if n := b.count(EventRequeued); n != 6 {
				t.Errorf("on host %s %d were put back, want 6", name, n)
			}
			for _, e := range b.of(EventRequeued) {
				if e.Waited > 100*time.Millisecond || !errors.Is(e.Err, ErrHeld) {
					t.Errorf("on host %s a task that could not wait was kept for %s and then got %v", name, e.Waited, e.Err)
				}
			}
		}
		w.until(5*time.Minute, "all gone", func() bool { return w.drained("one", "two") })
		if len(runs.overlaps()) != 0 || runs.count("red") != 9 || runs.count("blue") != 9 {
			t.Errorf("overlaps %v; red ran %d times, blue %d, want 9", runs.overlaps(), runs.count("red"), runs.count("blue"))
		}
		for _, info := range infos {
			w.untouched(info)
		}
		all := books{events: append(hosts["one"].of(), hosts["two"].of()...)}
		all.balance(t, 18+all.count(EventRequeued))
	})
}

func TestTheLimitEndsAWaitAndTheNextMayWaitThen(t *testing.T) {
	virtual(t, func(t *testing.T, w *world) {
		var b books
		var runs tally
		h := w.host("h")
		h.serve(ServerConfig(asynq.Config{}),
			h.locker(&b, WithKey(ByType), WithTTL(20*time.Second), WithPolicy(Wait(7*time.Second))).Middleware(working(&runs)))
		w.enqueue(job("work", time.Minute))
		w.until(5*time.Second, "holder running", func() bool { return runs.running("work") == 1 })
		info := w.enqueue(job("work", 0), asynq.MaxRetry(1))
		w.until(10*time.Second, "put back", func() bool { return b.count(EventRequeued) == 1 })
		e := b.of(EventRequeued)[0]
		if e.Waited != 7*time.Second || !errors.Is(e.Err, ErrHeld) {
			t.Errorf("put back after %s with %v, want 7 s and ErrHeld", e.Waited, e.Err)
		}
		w.until(5*time.Second, "in the retry set", func() bool { return w.state(info) == "retry" })
		if in := time.Until(w.task(info).NextProcessAt); in < 6*time.Second || in > 12*time.Second {
			t.Errorf("tried again in %s, want half the TTL or so", in)
		}
		// The seat is free again.
		another := w.enqueue(job("work", 0), asynq.MaxRetry(1))
		time.Sleep(3 * time.Second)
		if s := w.state(another); s != "active" {
			t.Errorf("the next task is %s, want active: waiting", s)
		}
		w.until(3*time.Minute, "all gone", func() bool { return w.drained() })
		w.untouched(info)
		if runs.count("work") != 3 || len(runs.overlaps()) != 0 {
			t.Errorf("%d runs, overlaps %v", runs.count("work"), runs.overlaps())
		}
		b.balance(t, 3+b.count(EventRequeued))
	})
}

func TestTheEndOfItsContextEndsAWait(t *testing.T) {
	for name, c := range map[string]struct {
		end   func(w *world, srv *asynq.Server, info *asynq.TaskInfo)
		cause error
		state string
	}{
		"cancelled": {func(w *world, _ *asynq.Server, info *asynq.TaskInfo) {
			if err := w.inspector.CancelProcessing(info.ID); err != nil {
				w.t.Error(err)
			}
		}, context.Canceled, "retry"},
		"shutdown": {func(_ *world, srv *asynq.Server, _ *asynq.TaskInfo) { srv.Shutdown() }, context.Canceled, "pending"},
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T, w *world) {
				var b books
				var runs tally
				h, other := w.host("h"), w.host("other")
				l := h.locker(&b, WithKey(ByType), WithTTL(20*time.Second), WithPolicy(Wait(time.Hour)))
				holder := other.locker(&b)
				lockName, _ := l.Name(t.Context(), job("work", 0))
				k, err := holder.TryAcquire(t.Context(), lockName)
				if err != nil {
					t.Fatal(err)
				}
				srv := h.serve(ServerConfig(asynq.Config{
					ShutdownTimeout: time.Second,
					RetryDelayFunc:  func(int, error, *asynq.Task) time.Duration { return time.Hour },
				}), l.Middleware(working(&runs)))
				time.Sleep(time.Second) // until the server listens for cancelations
				info := w.enqueue(job("work", 0), asynq.Timeout(30*time.Second), asynq.MaxRetry(3))
				w.until(5*time.Second, "waiting", func() bool { return w.state(info) == "active" })
				c.end(w, srv, info)
				ended := time.Now()
				w.until(2*time.Second, "wait over", func() bool { return b.count(EventRequeued) == 1 })
				if e := b.of(EventRequeued)[0]; !errors.Is(e.Err, c.cause) {
					t.Errorf("put back with %v, want %v", e.Err, c.cause)
				}
				if took := time.Since(ended); took > 20*time.Millisecond {
					t.Errorf("it went on for %s", took)
				}
				w.until(time.Second, "task "+c.state, func() bool { return w.state(info) == c.state })
				before := len(h.lockLink.sent("SET"))
				if err := k.Release(t.Context()); err != nil {
					t.Error(err)
				}
				time.Sleep(5 * time.Second)
				if runs.count("work") != 0 || len(h.lockLink.sent("SET")) != before {
					t.Error("a task that asynq has taken back went on for its lock")
				}
				b.balance(t, 1)
			})
		})
	}
}

// A task that asynq times out has failed, and one that waits has not: it leaves before that.
func TestAWaiterLeavesBeforeItsDeadlineAndIsNotCounted(t *testing.T) {
	virtual(t, func(t *testing.T, w *world) {
		var b books
		var told complaints
		h := w.host("h")
		l := h.locker(&b, WithPolicy(Wait(time.Hour)))
		lockName, _ := l.Name(t.Context(), job("work", 0))
		key, _ := l.redisKey(lockName)
		_ = w.redis.Set(key, heldByOther)
		h.serve(ServerConfig(asynq.Config{ErrorHandler: &told}), l.Middleware(asynq.NotFoundHandler()))
		info := w.enqueue(job("work", 0), asynq.Timeout(40*time.Second), asynq.MaxRetry(3))
		w.until(time.Minute, "put back", func() bool { return b.count(EventRequeued) == 1 && w.state(info) == "retry" })
		if e := b.of(EventRequeued)[0]; e.Waited < 36*time.Second || e.Waited > 39*time.Second || !errors.Is(e.Err, ErrHeld) {
			t.Errorf("put back after %s with %v; want a little before 40 s, and ErrHeld", e.Waited, e.Err)
		}
		w.untouched(info)
		if got := told.all(); len(got) != 0 {
			t.Errorf("reported %v", got)
		}
		b.balance(t, 1)
	})
}

func TestWaitersLeaveRoomForOtherWork(t *testing.T) {
	virtual(t, func(t *testing.T, w *world) {
		var b books
		var runs tally
		h := w.host("h")
		h.serve(ServerConfig(asynq.Config{Concurrency: 3}),
			h.locker(&b, WithKey(ByType), WithPolicy(Wait(time.Hour))).Middleware(working(&runs)))
		w.enqueue(job("slow", 5*time.Minute))
		w.until(5*time.Second, "slow one running", func() bool { return runs.running("slow") == 1 })
		for range 20 {
			w.enqueue(job("slow", time.Second), asynq.MaxRetry(1))
		}
		for range 10 {
			w.enqueue(job("quick", time.Second))
		}
		w.until(time.Minute, "other work done", func() bool { return runs.count("quick") == 10 && runs.running("quick") == 0 })
		if runs.count("slow") != 1 {
			t.Errorf("%d slow runs, want 1 so far", runs.count("slow"))
		}
		for _, r := range runs.of("quick") {
			if late := r.start.Sub(w.began); late > 30*time.Second {
				t.Errorf("other work had to wait for %s", late)
			}
		}
	})
}

func TestAWaitEndsWithWhatItFinds(t *testing.T) {
	for name, c := range map[string]struct {
		opts []Option
		end  func(w *world, h *host, key string)
		kind EventKind
		err  error
	}{
		"a done marker": {nil, func(w *world, _ *host, key string) {
			_ = w.redis.Set(key, encodeValue(Holder{TaskID: "winner", Done: true}, "token"))
		}, EventDone, nil},
		"an outage":                {nil, func(_ *world, h *host, _ string) { h.lockLink.cut() }, EventRequeued, ErrUnavailable},
		"an outage, and fail-open": {[]Option{WithFailOpen()}, func(_ *world, h *host, _ string) { h.lockLink.cut() }, EventRan, nil},
		"a refusal": {nil, func(_ *world, h *host, _ string) {
			h.lockLink.every("SET").refuse("NOPERM this user has no permissions to run the 'set' command")
		}, EventRefused, nil},
		"somebody's text": {nil, func(w *world, _ *host, key string) { _ = w.redis.Set(key, "mine") }, EventRefused, errForeignValue},
		"Shutdown":        {nil, func(w *world, h *host, _ string) {}, EventRequeued, ErrClosed},
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T, w *world) {
				var b books
				h := w.host("h")
				l := h.locker(&b, append(c.opts, WithKey(ByType), WithPolicy(Wait(time.Hour)))...)
				lockName, _ := l.Name(t.Context(), job("work", 0))
				key, _ := l.redisKey(lockName)
				_ = w.redis.Set(key, encodeValue(Holder{TaskID: "other", Host: "elsewhere"}, "token"))
				w.spawn(func() {
					time.Sleep(10 * time.Second)
					if name == "Shutdown" {
						if err := l.Shutdown(t.Context()); err != nil {
							t.Error(err)
						}
					}
					c.end(w, h, key)
				})
				err := l.Middleware(asynq.HandlerFunc(func(context.Context, *asynq.Task) error { return nil })).ProcessTask(t.Context(), job("work", 0))
				if c.err != nil && !errors.Is(err, c.err) {
					t.Errorf("error is %v, want %v", err, c.err)
				}
				if took := w.elapsed(); took > 12*time.Second {
					t.Errorf("went on for %s after that", took-10*time.Second)
				}
				e := b.of(c.kind)
				if len(e) != 1 || c.kind == EventDone && e[0].Holder.TaskID != "winner" {
					t.Errorf("events: %s, %+v", &b, e)
				}
				b.balance(t, 1)
			})
		})
	}
}

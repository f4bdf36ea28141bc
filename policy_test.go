package redislock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/redislock/internal/virtual"
	"github.com/hibiken/asynq"
)

// job is a task whose payload says how long it works.
func job(kind string, d time.Duration) *asynq.Task { return asynq.NewTask(kind, []byte(d.String())) }

// working is the handler of jobs, which notes in runs when they run. It heeds its context.
func working(runs *virtual.Tally) asynq.Handler {
	return asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
		defer runs.Start(task.Type())()
		d, err := time.ParseDuration(string(task.Payload()))
		if err != nil {
			return err
		}
		return virtual.Busy(ctx, d)
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
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				var runs virtual.Tally
				h := w.Host("h")
				h.Serve(ServerConfig(asynq.Config{RetryDelayFunc: func(int, error, *asynq.Task) time.Duration { return time.Hour }}),
					locker(h, &b, WithKey(ByType), WithTTL(time.Minute), WithPolicy(c.policy)).Middleware(working(&runs)))
				holder := w.Enqueue(job("work", 5*time.Minute))
				w.Until(5*time.Second, "holder running", func() bool { return runs.Running("work") == 1 })
				rival := w.Enqueue(job("work", 0), asynq.MaxRetry(3))
				w.Until(5*time.Second, "rival out of the worker", func() bool { return b.count(c.kind) == 1 && w.State(rival) == c.state })

				e := b.of(c.kind)[0]
				if e.TaskID != rival.ID || e.TaskType != "work" || e.Queue != "default" || e.Holder.TaskID != holder.ID || e.Holder.Host == "" {
					t.Errorf("the event does not name the task and its holder: %+v", e)
				}
				if e.Waited > 10*time.Millisecond {
					t.Errorf("it waited for %s", e.Waited)
				}
				now := w.Task(rival)
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
				if failed := w.Stats("default").Failed; failed != c.failed {
					t.Errorf("asynq counted %d failures, want %d", failed, c.failed)
				}
				if len(runs.Of("work")) != 1 {
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
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		var runs virtual.Tally
		h := w.Host("h")
		var holder, rival *asynq.TaskInfo
		asked := 0
		policy := PolicyFunc(func(ctx context.Context, task *asynq.Task, held *HeldError) error {
			asked++
			id, _ := asynq.GetTaskID(ctx)
			if id != rival.ID || string(task.Payload()) != "0s" || held.Holder.TaskID != holder.ID || held.Key != lockKeys(w)[0] || !errors.Is(held, ErrHeld) {
				t.Errorf("asked about task %s (%s) and %v", id, task.Payload(), held)
			}
			return nil
		})
		h.Serve(ServerConfig(asynq.Config{}), locker(h, &b, WithKey(ByType), WithPolicy(policy)).Middleware(working(&runs)))
		holder = w.Enqueue(job("work", 10*time.Second))
		w.Until(5*time.Second, "holder running", func() bool { return runs.Running("work") == 1 })
		rival = w.Enqueue(job("work", 0))
		w.Until(20*time.Second, "both gone", func() bool { return w.Drained() })
		if asked != 1 {
			t.Errorf("asked %d times", asked)
		}
		b.balance(t, 2)
	})
}

func TestJitterKeepsCopiesFromComingBackTogether(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		l := locker(w.Host("h"), &b, WithKey(ByType), WithPolicy(Retry(time.Minute)))
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
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				var runs virtual.Tally
				handler := locker(w.Host("h"), &b, WithKey(ByType), WithPolicy(Wait(time.Minute))).Middleware(working(&runs))
				w.Spawn(func() { _ = handler.ProcessTask(t.Context(), job("work", d+time.Second)) })
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
func handOver(t *testing.T, runs *virtual.Tally, bound time.Duration) {
	t.Helper()
	got := runs.Of("work")
	if len(got) != 2 {
		t.Fatalf("%d runs, want 2", len(got))
	}
	if gap := got[1].Start.Sub(got[0].End); gap < 0 || gap > bound {
		t.Errorf("the second run began %s after the end of the first, want at most %s", gap, bound)
	}
}

func TestAcrossProcessesAWaiterGetsItsLockWithinATenthOfTheTimeItWaited(t *testing.T) {
	for _, d := range append(waitedFor, 2500*time.Millisecond, 45*time.Second) {
		t.Run(d.String(), func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				var runs virtual.Tally
				first, second := w.Host("first"), w.Host("second")
				opts := Options(WithKey(ByType), WithPolicy(Wait(time.Minute)))
				holder, waiter := locker(first, &b, opts).Middleware(working(&runs)), locker(second, &b, opts).Middleware(working(&runs))
				w.Spawn(func() { _ = holder.ProcessTask(t.Context(), job("work", d+time.Second)) })
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
		virtual.Run(t, func(t *testing.T, w *virtual.World) {
			var b books
			var runs virtual.Tally
			h := w.Host("h")
			h.LockLink.Every("SET").DelayReply(trip)
			handler := locker(h, &b, WithKey(ByType), WithPolicy(Wait(time.Minute))).Middleware(working(&runs))
			w.Spawn(func() { _ = handler.ProcessTask(t.Context(), job("work", d)) })
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
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		other, h := w.Host("other"), w.Host("h")
		holder, l := locker(other, &b), locker(h, &b, WithKey(ByType), WithPolicy(Wait(20*time.Second)))
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
		polls := h.LockLink.Sent("SET")
		var late []time.Duration
		for i := 1; i < len(polls)-1; i++ { // the last one comes when the limit does
			interval, waited := polls[i].At.Sub(polls[i-1].At), polls[i-1].At.Sub(start)
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
		w.Until(time.Minute, "lock given up", func() bool { return b.count(EventLost) == 1 })
	})
}

func TestOneTaskPerKeyAndProcessWaitsAndTheOthersArePutBack(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var runs virtual.Tally
		var infos []*asynq.TaskInfo
		hosts := map[string]*books{"one": {}, "two": {}}
		for name, b := range hosts {
			h := w.Host(name)
			h.Serve(ServerConfig(asynq.Config{Concurrency: 20, Queues: map[string]int{name: 1}}),
				locker(h, b, WithKey(ByType), WithTTL(10*time.Second), WithPolicy(Wait(time.Hour))).Middleware(working(&runs)))
		}
		send := func(kind, queue string) {
			infos = append(infos, w.Enqueue(job(kind, 3*time.Second), asynq.Queue(queue), asynq.MaxRetry(1)))
		}
		send("red", "one")
		send("blue", "two")
		w.Until(5*time.Second, "both held", func() bool { return runs.Running("red") == 1 && runs.Running("blue") == 1 })
		for range 4 {
			for name := range hosts {
				send("red", name)
				send("blue", name)
			}
		}
		time.Sleep(2 * time.Second)
		// On each host one of each key waits, one works, and all the rest were sent away at once.
		for name, b := range hosts {
			if active := w.Stats(name).Active; active != 1+2 {
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
		w.Until(5*time.Minute, "all gone", func() bool { return w.Drained("one", "two") })
		if len(runs.Overlaps()) != 0 || runs.Count("red") != 9 || runs.Count("blue") != 9 {
			t.Errorf("overlaps %v; red ran %d times, blue %d, want 9", runs.Overlaps(), runs.Count("red"), runs.Count("blue"))
		}
		for _, info := range infos {
			w.Untouched(info)
		}
		all := books{events: append(hosts["one"].of(), hosts["two"].of()...)}
		all.balance(t, 18+all.count(EventRequeued))
	})
}

func TestTheLimitEndsAWaitAndTheNextMayWaitThen(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		var runs virtual.Tally
		h := w.Host("h")
		h.Serve(ServerConfig(asynq.Config{}),
			locker(h, &b, WithKey(ByType), WithTTL(20*time.Second), WithPolicy(Wait(7*time.Second))).Middleware(working(&runs)))
		w.Enqueue(job("work", time.Minute))
		w.Until(5*time.Second, "holder running", func() bool { return runs.Running("work") == 1 })
		info := w.Enqueue(job("work", 0), asynq.MaxRetry(1))
		w.Until(10*time.Second, "put back", func() bool { return b.count(EventRequeued) == 1 })
		e := b.of(EventRequeued)[0]
		if e.Waited != 7*time.Second || !errors.Is(e.Err, ErrHeld) {
			t.Errorf("put back after %s with %v, want 7 s and ErrHeld", e.Waited, e.Err)
		}
		w.Until(5*time.Second, "in the retry set", func() bool { return w.State(info) == "retry" })
		if in := time.Until(w.Task(info).NextProcessAt); in < 6*time.Second || in > 12*time.Second {
			t.Errorf("tried again in %s, want half the TTL or so", in)
		}
		// The seat is free again.
		another := w.Enqueue(job("work", 0), asynq.MaxRetry(1))
		time.Sleep(3 * time.Second)
		if s := w.State(another); s != "active" {
			t.Errorf("the next task is %s, want active: waiting", s)
		}
		w.Until(3*time.Minute, "all gone", func() bool { return w.Drained() })
		w.Untouched(info)
		if runs.Count("work") != 3 || len(runs.Overlaps()) != 0 {
			t.Errorf("%d runs, overlaps %v", runs.Count("work"), runs.Overlaps())
		}
		b.balance(t, 3+b.count(EventRequeued))
	})
}

func TestTheEndOfItsContextEndsAWait(t *testing.T) {
	for name, c := range map[string]struct {
		end   func(w *virtual.World, srv *asynq.Server, info *asynq.TaskInfo)
		cause error
		state string
	}{
		"cancelled": {func(w *virtual.World, _ *asynq.Server, info *asynq.TaskInfo) {
			if err := w.Inspector.CancelProcessing(info.ID); err != nil {
				w.T.Error(err)
			}
		}, context.Canceled, "retry"},
		"shutdown": {func(_ *virtual.World, srv *asynq.Server, _ *asynq.TaskInfo) { srv.Shutdown() }, context.Canceled, "pending"},
	} {
		t.Run(name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				var runs virtual.Tally
				h, other := w.Host("h"), w.Host("other")
				l := locker(h, &b, WithKey(ByType), WithTTL(20*time.Second), WithPolicy(Wait(time.Hour)))
				holder := locker(other, &b)
				lockName, _ := l.Name(t.Context(), job("work", 0))
				k, err := holder.TryAcquire(t.Context(), lockName)
				if err != nil {
					t.Fatal(err)
				}
				srv := h.Serve(ServerConfig(asynq.Config{
					ShutdownTimeout: time.Second,
					RetryDelayFunc:  func(int, error, *asynq.Task) time.Duration { return time.Hour },
				}), l.Middleware(working(&runs)))
				time.Sleep(time.Second) // until the server listens for cancelations
				info := w.Enqueue(job("work", 0), asynq.Timeout(30*time.Second), asynq.MaxRetry(3))
				w.Until(5*time.Second, "waiting", func() bool { return w.State(info) == "active" })
				c.end(w, srv, info)
				ended := time.Now()
				w.Until(2*time.Second, "wait over", func() bool { return b.count(EventRequeued) == 1 })
				if e := b.of(EventRequeued)[0]; !errors.Is(e.Err, c.cause) {
					t.Errorf("put back with %v, want %v", e.Err, c.cause)
				}
				if took := time.Since(ended); took > 20*time.Millisecond {
					t.Errorf("it went on for %s", took)
				}
				w.Until(time.Second, "task "+c.state, func() bool { return w.State(info) == c.state })
				before := len(h.LockLink.Sent("SET"))
				if err := k.Release(t.Context()); err != nil {
					t.Error(err)
				}
				time.Sleep(5 * time.Second)
				if runs.Count("work") != 0 || len(h.LockLink.Sent("SET")) != before {
					t.Error("a task that asynq has taken back went on for its lock")
				}
				b.balance(t, 1)
			})
		})
	}
}

// A task that asynq times out has failed, and one that waits has not: it leaves before that.
func TestAWaiterLeavesBeforeItsDeadlineAndIsNotCounted(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		var told complaints
		h := w.Host("h")
		l := locker(h, &b, WithPolicy(Wait(time.Hour)))
		lockName, _ := l.Name(t.Context(), job("work", 0))
		key, _ := l.redisKey(lockName)
		_ = w.Redis.Set(key, heldByOther)
		h.Serve(ServerConfig(asynq.Config{ErrorHandler: &told}), l.Middleware(asynq.NotFoundHandler()))
		info := w.Enqueue(job("work", 0), asynq.Timeout(40*time.Second), asynq.MaxRetry(3))
		w.Until(time.Minute, "put back", func() bool { return b.count(EventRequeued) == 1 && w.State(info) == "retry" })
		if e := b.of(EventRequeued)[0]; e.Waited < 36*time.Second || e.Waited > 39*time.Second || !errors.Is(e.Err, ErrHeld) {
			t.Errorf("put back after %s with %v; want a little before 40 s, and ErrHeld", e.Waited, e.Err)
		}
		w.Untouched(info)
		if got := told.all(); len(got) != 0 {
			t.Errorf("reported %v", got)
		}
		b.balance(t, 1)
	})
}

func TestWaitersLeaveRoomForOtherWork(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		var runs virtual.Tally
		h := w.Host("h")
		h.Serve(ServerConfig(asynq.Config{Concurrency: 3}),
			locker(h, &b, WithKey(ByType), WithPolicy(Wait(time.Hour))).Middleware(working(&runs)))
		w.Enqueue(job("slow", 5*time.Minute))
		w.Until(5*time.Second, "slow one running", func() bool { return runs.Running("slow") == 1 })
		for range 20 {
			w.Enqueue(job("slow", time.Second), asynq.MaxRetry(1))
		}
		for range 10 {
			w.Enqueue(job("quick", time.Second))
		}
		w.Until(time.Minute, "other work done", func() bool { return runs.Count("quick") == 10 && runs.Running("quick") == 0 })
		if runs.Count("slow") != 1 {
			t.Errorf("%d slow runs, want 1 so far", runs.Count("slow"))
		}
		for _, r := range runs.Of("quick") {
			if late := r.Start.Sub(w.Began); late > 30*time.Second {
				t.Errorf("other work had to wait for %s", late)
			}
		}
	})
}

func TestAWaitEndsWithWhatItFinds(t *testing.T) {
	for name, c := range map[string]struct {
		opts []Option
		end  func(w *virtual.World, h *virtual.Host, key string)
		kind EventKind
		err  error
	}{
		"a done marker": {nil, func(w *virtual.World, _ *virtual.Host, key string) {
			_ = w.Redis.Set(key, encodeValue(Holder{TaskID: "winner", Done: true}, "token"))
		}, EventDone, nil},
		"an outage":                {nil, func(_ *virtual.World, h *virtual.Host, _ string) { h.LockLink.Cut() }, EventRequeued, ErrUnavailable},
		"an outage, and fail-open": {[]Option{WithFailOpen()}, func(_ *virtual.World, h *virtual.Host, _ string) { h.LockLink.Cut() }, EventRan, nil},
		"a refusal": {nil, func(_ *virtual.World, h *virtual.Host, _ string) {
			h.LockLink.Every("SET").Refuse("NOPERM this user has no permissions to run the 'set' command")
		}, EventRefused, nil},
		"somebody's text": {nil, func(w *virtual.World, _ *virtual.Host, key string) { _ = w.Redis.Set(key, "mine") }, EventRefused, errForeignValue},
		"Shutdown":        {nil, func(w *virtual.World, h *virtual.Host, _ string) {}, EventRequeued, ErrClosed},
	} {
		t.Run(name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				h := w.Host("h")
				l := locker(h, &b, append(c.opts, WithKey(ByType), WithPolicy(Wait(time.Hour)))...)
				lockName, _ := l.Name(t.Context(), job("work", 0))
				key, _ := l.redisKey(lockName)
				_ = w.Redis.Set(key, encodeValue(Holder{TaskID: "other", Host: "elsewhere"}, "token"))
				w.Spawn(func() {
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
				if took := w.Elapsed(); took > 12*time.Second {
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

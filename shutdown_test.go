package redislock

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"example.com/redislock/internal/virtual"
	"github.com/hibiken/asynq"
)

func TestShutdownWaitsForHandlersAndReleases(t *testing.T) {
	for name, takes := range map[string]time.Duration{"quick release": 0, "slow release": time.Second} {
		t.Run(name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				f := &fleet{World: w}
				do := func(ctx context.Context, _ fleetRun) error { return virtual.Busy(ctx, 10*time.Second) }
				plain := f.add("plain", do, WithTTL(4*time.Second), WithKey(ByTaskID))
				marked := f.add("done for", do, WithTTL(4*time.Second), WithKey(ByTaskID), WithDoneFor(time.Minute))
				a := f.join("a", asynq.Config{})
				var keys []string
				for range 3 {
					plain.enqueue()
					marked.enqueue()
				}
				w.Until(5*time.Second, "all at work", func() bool { return f.all(haveRun(3)) })
				for _, e := range plain.books.of(EventAcquired) {
					keys = append(keys, e.Key)
				}
				// Longer than a handler waits for it, and twice that, since Redis does not know the scripts yet.
				a.LockLink.Every(releaseScript.Hash()).Delay(takes)
				a.LockLink.Every(doneScript.Hash()).Delay(takes)
				for _, k := range f.works {
					if err := a.lockers[k].Shutdown(t.Context()); err != nil {
						k.errorf("Shutdown: %v", err)
					}
					if n := len(k.succeeded()); n != 3 {
						k.errorf("Shutdown has returned when %d of 3 handlers had come to their own end", n)
					}
					if n := k.books.count(EventReleased); n != 3 {
						k.errorf("Shutdown has returned before the releases: %s", &k.books)
					}
				}
				for _, key := range keys {
					if w.Redis.Exists(key) {
						t.Errorf("Shutdown has returned, and %s is still there", key)
					}
				}
				for _, e := range marked.books.of(EventAcquired) {
					value, _ := w.Redis.Get(e.Key)
					if h, err := decodeValue(value); err != nil || !h.Done {
						t.Errorf("Shutdown has returned, and at %s there is %q, no marker", e.Key, value)
					}
				}
				f.audit()
			})
		})
	}
}

func TestShutdownOfAnIdleLockerReturnsAtOnce(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		over, cancel := context.WithCancel(t.Context())
		cancel()
		for name, ctx := range map[string]context.Context{"patient": t.Context(), "context over": over} {
			h := w.Host(name)
			var b books
			fresh, used := locker(h, &b), locker(h, &b)
			if err := used.Do(t.Context(), "name", func(context.Context) error { return nil }); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Millisecond) // so that the release is over, and not only done
			began := time.Now()
			for range 3 {
				if err := errors.Join(fresh.Shutdown(ctx), used.Shutdown(ctx)); err != nil || time.Since(began) > 0 {
					t.Errorf("%s: %v after %v", name, err, time.Since(began))
				}
			}
			b.balance(t, 0)
		}
	})
}

func TestManyMayCallShutdown(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		l := locker(w.Host("h"), &b)
		lock, err := l.TryAcquire(t.Context(), "name")
		if err != nil {
			t.Fatal(err)
		}
		impatient, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		type call struct {
			ctx  context.Context
			want error
			took time.Duration
		}
		calls := []call{
			{t.Context(), nil, 10 * time.Second},
			{t.Context(), nil, 10 * time.Second},
			{impatient, context.DeadlineExceeded, 5 * time.Second},
			{impatient, context.DeadlineExceeded, 5 * time.Second},
			{t.Context(), nil, 10 * time.Second},
		}
		began := time.Now()
		var wg sync.WaitGroup
		for i, c := range calls {
			wg.Go(func() {
				if err := l.Shutdown(c.ctx); !errors.Is(err, c.want) || time.Since(began) != c.took {
					t.Errorf("call %d returned %v after %v, want %v after %v", i, err, time.Since(began), c.want, c.took)
				}
			})
		}
		time.Sleep(10 * time.Second)
		if cause := context.Cause(lock.Context()); !errors.Is(cause, ErrClosed) {
			t.Errorf("the lock's context ended because of %v", cause)
		}
		_ = lock.Release(t.Context()) // the work is over
		wg.Wait()
		if err := l.Shutdown(impatient); err != nil {
			t.Errorf("once all is quiet: %v", err)
		}
		if n := b.count(EventAbandoned); n != 1 {
			t.Errorf("want it abandoned once: %s", &b)
		}
		b.balance(t, 0)
	})
}

func TestAClosedLockerRefusesTryAcquireAndDo(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		h := w.Host("h")
		var b books
		l := locker(h, &b, WithFailOpen())
		lock, err := l.TryAcquire(t.Context(), "before")
		if err != nil {
			t.Fatal(err)
		}
		closed := make(chan error, 1)
		w.Spawn(func() { closed <- l.Shutdown(context.Background()) })
		time.Sleep(time.Second)
		h.LockLink.Forget()

		if _, err := l.TryAcquire(t.Context(), "after"); !errors.Is(err, ErrClosed) || errors.Is(err, ErrUnavailable) {
			t.Errorf("TryAcquire: %v", err)
		}
		err = l.Do(t.Context(), "after", func(context.Context) error {
			t.Error("Do ran its function")
			return nil
		})
		if !errors.Is(err, ErrClosed) {
			t.Errorf("Do: %v", err)
		}
		if sent := h.LockLink.Sent(""); len(sent) > 0 {
			t.Errorf("Redis was asked: %v", sent)
		}
		// The lock from before is as good as ever, for more than its TTL, until it is released.
		time.Sleep(time.Minute)
		if err := lock.Check(t.Context()); err != nil {
			t.Errorf("Check of a lock from before: %v", err)
		}
		if len(closed) > 0 {
			t.Fatal("Shutdown did not wait for it")
		}
		if err := lock.Release(t.Context()); err != nil {
			t.Errorf("Release of a lock from before: %v", err)
		}
		time.Sleep(time.Millisecond)
		if len(closed) == 0 || <-closed != nil {
			t.Error("Shutdown has not returned nil")
		}
		b.balance(t, 0)
	})
}

// Somebody shut the locks down while the server went on.
func TestNewTasksOfAClosedLockerRunElsewhere(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		f := &fleet{World: w}
		last := map[*work]bool{}
		for _, p := range append(policiesWithoutASay(t), policyCase{"the default", Policy{}}) {
			for _, variant := range []struct {
				name string
				last bool
				opts []Option
			}{
				{"", false, nil},
				{", fail open, done for", false, []Option{WithFailOpen(), WithDoneFor(time.Hour)}},
				{", last attempt, fail open", true, []Option{WithFailOpen()}},
			} {
				k := f.add(p.name+variant.name, func(context.Context, fleetRun) error { return nil },
					WithTTL(4*time.Second), WithPolicy(p.policy), Options(variant.opts...))
				last[k] = variant.last
			}
		}
		closed := f.join("closed", asynq.Config{ShutdownTimeout: time.Second})
		for _, l := range closed.lockers {
			if err := l.Shutdown(t.Context()); err != nil {
				t.Error(err)
			}
		}
		closed.LockLink.Cut() // which makes it no reason to fail open either
		infos := map[*work]*asynq.TaskInfo{}
		for _, k := range f.works {
			if last[k] {
				infos[k] = k.enqueue(asynq.MaxRetry(0))
			} else {
				infos[k] = k.enqueue(asynq.MaxRetry(3))
			}
		}
		time.Sleep(10 * time.Second)
		for _, k := range f.works {
			if n := len(k.ran()); n > 0 {
				k.errorf("%d runs on the closed host", n)
			}
			k.wantUntouched(infos[k], 0)
			if last[k] {
				k.wantState("active", infos[k])
				continue
			}
			requeued := k.books.of(EventRequeued)
			if len(requeued) < 2 || !errors.Is(requeued[0].Err, ErrClosed) || errors.Is(requeued[0].Err, ErrUnavailable) {
				k.errorf("want it put back again and again, since the Locker is closed: %+v", requeued)
			}
		}
		other := f.join("other", asynq.Config{})
		closed.server.Shutdown() // and with it goes the context of those that stayed
		w.Until(10*time.Second, "all done", func() bool { return w.Drained() })
		f.wantOneRunEach(other, infos)
	})
}

func TestALastAttemptStaysWithAClosedLockerUntilItsContextEnds(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		f := &fleet{World: w}
		k := f.add("work", func(context.Context, fleetRun) error { return nil })
		a := f.join("a", asynq.Config{})
		_ = a.lockers[k].Shutdown(t.Context())
		info := k.enqueue(asynq.MaxRetry(0), asynq.Timeout(20*time.Second))
		w.Until(5*time.Second, "there", func() bool { return k.deliveryCount() == 1 })
		time.Sleep(20*time.Second - 50*time.Millisecond)
		k.wantState("active", info) // not put back shortly before the deadline: asynq would archive it
		time.Sleep(100 * time.Millisecond)
		outcome := k.books.of()
		if len(outcome) != 1 || outcome[0].Kind != EventRequeued || !errors.Is(outcome[0].Err, context.DeadlineExceeded) {
			t.Errorf("want it to be asynq's again: %+v", outcome)
		}
		f.audit()
	})
}

func TestShutdownWakesThoseThatWait(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		f := &fleet{World: w}
		do := func(context.Context, fleetRun) error { return nil }
		waiter := f.add("Wait", do, WithPolicy(Wait(time.Hour)))
		last := f.add("last attempt", do, WithPolicy(Retry(0)))
		open := f.add("Wait, fail open", do, WithPolicy(Wait(time.Hour)), WithFailOpen())
		a := f.join("a", asynq.Config{ShutdownTimeout: time.Second})
		infos := map[*work]*asynq.TaskInfo{}
		releases := map[*work]func(){}
		for _, k := range f.works {
			releases[k] = k.hold()
		}
		infos[waiter], infos[open] = waiter.enqueue(), open.enqueue()
		infos[last] = last.enqueue(asynq.MaxRetry(0))
		w.Until(5*time.Second, "all waiting", func() bool { return f.all(delivered(1)) })
		time.Sleep(10 * time.Second)
		for _, k := range f.works {
			if n := k.books.count(); n > 0 {
				k.errorf("it should still be waiting: %s", &k.books)
			}
		}
		called := time.Now()
		for _, k := range f.works {
			if err := a.lockers[k].Shutdown(t.Context()); err != nil || time.Since(called) > 0 {
				k.errorf("Shutdown: %v after %v; want it not to wait for one that only waits itself", err, time.Since(called))
			}
		}
		time.Sleep(time.Millisecond)
		for _, k := range []*work{waiter, open} {
			if e := k.books.of(); len(e) != 1 || e[0].Kind != EventRequeued || !errors.Is(e[0].Err, ErrClosed) {
				k.errorf("want it put back at once, since the Locker is closed: %+v", e)
			}
		}
		for _, k := range f.works {
			releases[k]() // too late for this host
		}
		time.Sleep(time.Second)
		last.wantState("active", infos[last])
		other := f.join("other", asynq.Config{})
		a.server.Shutdown()
		w.Until(time.Minute, "all done", func() bool { return w.Drained() })
		f.wantOneRunEach(other, infos)
	})
}

// The program loses its patience while its server goes on, so that nothing else ends the handlers.
func TestAnImpatientShutdownCancelsHandlers(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		f := &fleet{World: w}
		var causes sync.Map // by work
		do := func(k **work) func(context.Context, fleetRun) error {
			return func(ctx context.Context, j fleetRun) error {
				if j.nth > 1 {
					return nil
				}
				err := virtual.Busy(ctx, time.Hour)
				causes.Store(*k, err)
				return err
			}
		}
		var plain, done *work
		plain = f.add("plain", do(&plain), WithTTL(10*time.Second))
		done = f.add("done for", do(&done), WithTTL(10*time.Second), WithDoneFor(time.Hour))
		a := f.join("a", asynq.Config{})
		infos := map[*work]*asynq.TaskInfo{}
		for _, k := range f.works {
			infos[k] = k.enqueue(asynq.MaxRetry(3))
		}
		w.Until(5*time.Second, "all at work", func() bool { return f.all(haveRun(1)) })

		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		for _, k := range f.works {
			w.Spawn(func() {
				if err := a.lockers[k].Shutdown(ctx); !errors.Is(err, context.DeadlineExceeded) {
					k.errorf("Shutdown: %v", err)
				}
			})
		}
		time.Sleep(3*time.Second - time.Millisecond)
		causes.Range(func(k, err any) bool { t.Errorf("%s: cancelled early: %v", k.(*work).name, err); return true })
		time.Sleep(2 * time.Millisecond)
		for _, k := range f.works {
			if err, _ := causes.Load(k); err == nil || !errors.Is(err.(error), ErrClosed) {
				k.errorf("the handler's context ended because of %v, want ErrClosed", err)
			}
			if w.Redis.Exists(k.key()) {
				k.errorf("the handler has returned with an error, and there still is something at the key")
			}
			if k.books.count(EventAbandoned) != 1 || k.books.count(EventReleased, EventLost) != 0 {
				k.errorf("want it abandoned: %s", &k.books)
			}
			if err := a.lockers[k].Shutdown(t.Context()); err != nil {
				k.errorf("Shutdown once more, when all is quiet: %v", err)
			}
		}
		other := f.join("other", asynq.Config{})
		a.server.Shutdown()
		w.Until(10*time.Second, "all done", func() bool { return w.Drained() })
		for _, k := range f.works {
			k.wantState("gone", infos[k])
			if ran := k.ran(); len(ran) != 2 || ran[1].at != other {
				k.errorf("runs: %v, want another one on the other host", ran)
			}
		}
		f.audit()
	})
}

// What a program does at its end: first the server, which hands its tasks on, then the locks, with some patience.
func TestAnImpatientShutdownLeavesTheKeyOfADeafHandlerToLapse(t *testing.T) {
	for _, test := range []struct {
		name string
		end  time.Duration // of the deaf handler, after Shutdown has returned; 0 if that is the end of the process
	}{
		{"the process ends", 0},
		{"the handler ends before the key lapses", 4 * time.Second}, // longer than the pause between two extensions
	} {
		t.Run(test.name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				const ttl = 10 * time.Second
				f := &fleet{World: w}
				finish := make(chan struct{})
				for _, p := range policiesWithoutASay(t) {
					for _, doneFor := range []time.Duration{0, time.Hour} {
						f.add(fmt.Sprintf("%s, done for %v", p.name, doneFor), func(_ context.Context, j fleetRun) error {
							if j.nth > 1 {
								return nil
							}
							select {
							case <-finish:
							case <-w.Over:
							}
							return errors.New("in vain")
						}, WithTTL(ttl), WithPolicy(p.policy), WithDoneFor(doneFor))
					}
				}
				first := f.join("first", asynq.Config{ShutdownTimeout: time.Second})
				infos, values := map[*work]*asynq.TaskInfo{}, map[*work]string{}
				for _, k := range f.works {
					infos[k] = k.enqueue(asynq.MaxRetry(0))
				}
				w.Until(5*time.Second, "all at work", func() bool { return f.all(haveRun(1)) })
				for _, k := range f.works {
					values[k], _ = w.Redis.Get(k.key())
				}
				second := f.join("second", asynq.Config{})
				first.server.Shutdown()
				ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
				defer cancel()
				for _, k := range f.works {
					if err := first.lockers[k].Shutdown(ctx); !errors.Is(err, context.DeadlineExceeded) {
						k.errorf("Shutdown: %v", err)
					}
				}
				returned := time.Now()
				time.Sleep(time.Millisecond)
				first.LockLink.Forget()
				for _, k := range f.works {
					left := w.Redis.TTL(k.key())
					if value, _ := w.Redis.Get(k.key()); value != values[k] || left <= 0 || left > ttl {
						k.errorf("after Shutdown, at the key: %q for %v more, was %q", value, left, values[k])
					}
					if k.books.count(EventAbandoned) != 1 || k.books.count(EventReleased, EventLost) != 0 {
						k.errorf("want it abandoned: %s", &k.books)
					}
					k.wantUntouched(infos[k], 0)
				}
				if test.end == 0 {
					first.kill()
				} else {
					time.Sleep(test.end)
					if sent := first.LockLink.Sent(""); len(sent) > 0 {
						t.Errorf("the host still has something to say after Shutdown: %v", sent)
					}
					close(finish)
				}
				w.Until(30*time.Second, "all done", func() bool { return w.Drained() })
				for _, k := range f.works {
					k.wantState("gone", infos[k])
					runs := f.runs.Of(k.key())
					if ran := k.ran(); len(ran) != 2 || ran[1].at != second {
						k.errorf("runs: %v, want another one on the second host", ran)
						continue
					}
					if late := runs[1].Start.Sub(returned); late > ttl+time.Second {
						k.errorf("the second run began %v after Shutdown, want about one TTL, %v, at most", late, ttl)
					}
					if test.end > 0 && runs[1].Start.Before(runs[0].End) {
						k.errorf("the second run began before the first one ended")
					}
				}
				if got := f.runs.Overlaps(); len(got) > 0 {
					t.Errorf("overlaps: %q", got)
				}
				if s := w.Stats("default"); s.Failed != 0 {
					t.Errorf("failed %d, want none", s.Failed)
				}
			})
		})
	}
}

// Shutdown is called while Redis has the request for a lock and not answered yet.
func TestShutdownMeetsAnAcquireUnderWay(t *testing.T) {
	for _, test := range []struct {
		name     string
		patience time.Duration
		opts     []Option
		trouble  func(*virtual.Fault)
		runs     bool // in the end, under the lock, and Shutdown waits for it
	}{
		{"patient", time.Hour, nil, func(f *virtual.Fault) { f.Delay(2 * time.Second) }, true},
		{"impatient, late request", time.Second, nil, func(f *virtual.Fault) { f.Delay(2 * time.Second) }, false},
		{"impatient, late reply", time.Second, nil, func(f *virtual.Fault) { f.DelayReply(2 * time.Second) }, false},
		{"impatient, fail open", time.Second, []Option{WithFailOpen()}, func(f *virtual.Fault) { f.DelayReply(2 * time.Second) }, false},
		{"patient, no reply", time.Hour, nil, func(f *virtual.Fault) { f.SwallowReply() }, false},
		{"patient, no reply, fail open", time.Hour, []Option{WithFailOpen()}, func(f *virtual.Fault) { f.SwallowReply() }, false},
		{"impatient, no reply, fail open", time.Second, []Option{WithFailOpen()}, func(f *virtual.Fault) { f.SwallowReply() }, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				f := &fleet{World: w}
				k := f.add("work", func(ctx context.Context, _ fleetRun) error { return virtual.Busy(ctx, 4*time.Second) },
					WithTTL(10*time.Second), Options(test.opts...))
				a := f.join("a", asynq.Config{ShutdownTimeout: time.Second})
				test.trouble(a.LockLink.Next("SET", k.key()))
				info := k.enqueue(asynq.MaxRetry(3))
				w.Until(5*time.Second, "asked for", func() bool { return len(a.LockLink.Sent("SET", k.key())) == 1 })

				asked := time.Now()
				ctx, cancel := context.WithTimeout(t.Context(), test.patience)
				defer cancel()
				_ = a.lockers[k].Shutdown(ctx)
				if test.runs {
					if len(k.succeeded()) != 1 {
						t.Error("Shutdown has returned before the handler that its Locker let run")
					}
					k.books.balance(t, 1)
					return
				}
				time.Sleep(time.Until(asked.Add(7 * time.Second))) // what was claimed has not lapsed yet, but was given back
				if n := len(k.ran()); n > 0 {
					t.Errorf("%d runs of a Locker that is shut down", n)
				}
				k.wantUntouched(info, 0)
				if w.Redis.Exists(k.key()) {
					t.Error("the key is not free")
				}
				other := f.join("other", asynq.Config{})
				a.server.Shutdown()
				w.Until(10*time.Second, "done", func() bool { return w.Drained() })
				if ran := k.ran(); len(ran) != 1 || ran[0].at != other {
					t.Errorf("runs: %v, want one on the other host", ran)
				}
				f.audit()
			})
		})
	}
}

// wantOneRunEach checks that every work was done once, on that host, and that nothing was counted as a failure.
func (f *fleet) wantOneRunEach(at *station, infos map[*work]*asynq.TaskInfo) {
	f.T.Helper()
	for _, k := range f.works {
		k.wantState("gone", infos[k])
		if ran := k.ran(); len(ran) != 1 || ran[0].at != at {
			k.errorf("runs: %v, want one on the other host", ran)
		}
	}
	if s := f.Stats("default"); s.Failed != 0 {
		f.T.Errorf("failed %d, want none", s.Failed)
	}
	f.audit()
}

package redislock

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"example.com/redislock/internal/virtual"
	"github.com/hibiken/asynq"
)

// hold takes the work's lock from a host without trouble, as somebody outside of any task, until the function it returns
// is called.
func (k *work) hold() (release func()) {
	w := k.fleet.World
	w.T.Helper()
	l, err := New(w.RDB, Options(k.opts...))
	if err != nil {
		w.T.Fatal(err)
	}
	name, err := l.Name(w.T.Context(), k.task())
	if err != nil {
		w.T.Fatal(err)
	}
	lock, err := l.TryAcquire(w.T.Context(), name)
	if err != nil {
		w.T.Fatal(err)
	}
	w.AtEnd(func() { _ = lock.Release(context.Background()) })
	return func() {
		w.T.Helper()
		if err := lock.Release(w.T.Context()); err != nil {
			k.errorf("release: %v", err)
		}
	}
}

// putBack are the policies that put a task back. On the last attempt asynq would archive it instead.
func putBack() []policyCase {
	return []policyCase{
		{"Retry", Retry(time.Second)},
		{"Wait a little", Wait(2 * time.Second)},
		{"Wait long", Wait(time.Hour)},
		{"Wait not at all", Wait(0)},
		{"PolicyFunc", PolicyFunc(func(_ context.Context, _ *asynq.Task, held *HeldError) error {
			return fmt.Errorf("busy: %w", held)
		})},
	}
}

func TestALastAttemptWaitsInPlaceForItsLock(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		f := &fleet{World: w}
		waits := map[*work]int{}
		for _, p := range putBack() {
			for _, failures := range []int{0, 2} {
				k := f.add(fmt.Sprintf("%s, after %d failures", p.name, failures), func(_ context.Context, j fleetRun) error {
					if j.nth <= failures {
						return errors.New("not yet")
					}
					return nil
				}, WithTTL(4*time.Second), WithPolicy(p.policy))
				waits[k] = failures
			}
		}
		f.join("a", asynq.Config{})
		infos := map[*work]*asynq.TaskInfo{}
		releases := map[*work]func(){}
		for _, k := range f.works {
			if waits[k] == 0 {
				releases[k] = k.hold()
			}
			infos[k] = k.enqueue(asynq.MaxRetry(waits[k]))
		}
		// Those that may fail twice do so, one second after the other, and meet the lock then.
		f.Until(10*time.Second, "failures", func() bool { return f.all(func(k *work) bool { return len(k.ran()) == waits[k] }) })
		for _, k := range f.works {
			if waits[k] > 0 {
				releases[k] = k.hold()
			}
		}
		f.Until(10*time.Second, "last attempts", func() bool { return f.all(func(k *work) bool { return k.deliveryCount() > waits[k] }) })
		time.Sleep(10 * time.Second)
		for _, k := range f.works {
			k.wantState("active", infos[k])
			if n := len(k.ran()); n != waits[k] {
				k.errorf("%d runs, want %d before the lock is free", n, waits[k])
			}
			if n := k.deliveryCount(); n != waits[k]+1 {
				k.errorf("delivered %d times, want %d: it stays where it is", n, waits[k]+1)
			}
			if now := w.Task(infos[k]); now == nil || now.Retried != waits[k] {
				k.errorf("task %+v, want it retried %d times", now, waits[k])
			}
		}
		for _, k := range f.works {
			releases[k]()
		}
		time.Sleep(300 * time.Millisecond) // a hand-over between processes takes 250 ms at most
		for _, k := range f.works {
			k.wantState("gone", infos[k])
			if n := len(k.ran()); n != waits[k]+1 {
				k.errorf("%d runs, want %d", n, waits[k]+1)
			}
			if n := k.books.count(EventRan); n != waits[k]+1 || len(k.books.of()) != 3*n {
				k.errorf("want nothing but runs and their locks: %s", &k.books)
			}
		}
		f.audit()
	})
}

func TestALastAttemptGivesUpShortlyBeforeItsDeadline(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		f := &fleet{World: w}
		type limits struct {
			timeout, waits time.Duration
		}
		tests := map[*work]limits{}
		for _, test := range []limits{
			{1 * time.Second, 0}, // never was further away than near
			{2 * time.Second, 1 * time.Second},
			{10 * time.Second, 9 * time.Second}, // a second before it
			{20 * time.Second, 19 * time.Second},
			{60 * time.Second, 57 * time.Second}, // a twentieth before it
		} {
			for _, p := range putBack()[:2] {
				k := f.add(fmt.Sprintf("%s, timeout %v", p.name, test.timeout), func(context.Context, fleetRun) error { return nil },
					WithTTL(4*time.Second), WithPolicy(p.policy))
				tests[k] = test
			}
		}
		infos := map[*work]*asynq.TaskInfo{}
		for _, k := range f.works {
			defer k.hold()()
		}
		f.join("a", asynq.Config{})
		for _, k := range f.works {
			infos[k] = k.enqueue(asynq.MaxRetry(0), asynq.Timeout(tests[k].timeout))
		}
		time.Sleep(60 * time.Second)
		for _, k := range f.works {
			outcome := k.books.of()
			if len(outcome) != 1 || outcome[0].Kind != EventArchived || !errors.Is(outcome[0].Err, ErrHeld) || outcome[0].Holder.Host == "" {
				k.errorf("want it archived, in the name of the holder: %+v", outcome)
				continue
			}
			if off := outcome[0].Waited - tests[k].waits; off < 0 || off > 10*time.Millisecond {
				k.errorf("waited %v, want %v", outcome[0].Waited, tests[k].waits)
			}
			if now := w.Task(infos[k]); now == nil || now.State != asynq.TaskStateArchived || now.LastErr != outcome[0].Err.Error() {
				k.errorf("task: %+v, want it in the archive with the reason", now)
			}
			if len(k.ran()) > 0 {
				k.errorf("it ran without its lock")
			}
		}
		f.audit()
	})
}

func TestALastAttemptSitsOutAnOutage(t *testing.T) {
	for name, trouble := range map[string]func(*virtual.Link){
		"cut":     (*virtual.Link).Cut,
		"hang":    (*virtual.Link).Hang,
		"loading": func(l *virtual.Link) { l.Every("SET").Refuse("LOADING Redis is loading the dataset in memory") },
	} {
		t.Run(name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				f := &fleet{World: w}
				infos := map[*work]*asynq.TaskInfo{}
				for _, p := range []policyCase{{"Skip", Skip()}, {"Archive", Archive()}, putBack()[0], putBack()[2], putBack()[4]} {
					f.add(p.name, func(context.Context, fleetRun) error { return nil }, WithTTL(4*time.Second), WithPolicy(p.policy))
				}
				a := f.join("a", asynq.Config{})
				trouble(a.LockLink)
				for _, k := range f.works {
					infos[k] = k.enqueue(asynq.MaxRetry(0))
				}
				time.Sleep(6 * time.Second)
				for _, k := range f.works {
					k.wantState("active", infos[k])
				}
				a.LockLink.Heal()
				f.Until(5*time.Second, "all done", func() bool { return w.Drained() })
				for _, k := range f.works {
					k.wantState("gone", infos[k])
					if len(k.ran()) != 1 || k.deliveryCount() != 1 {
						k.errorf("%d runs, %s; want one, and no other outcome", len(k.ran()), &k.books)
					}
				}
				f.audit()
			})
		})
	}
}

// All of them wait where they are: doc.go says that they can fill a worker.
func TestManyLastAttemptsRunOneAfterTheOther(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		f := &fleet{World: w}
		k := f.add("work", func(ctx context.Context, _ fleetRun) error { return virtual.Busy(ctx, time.Second) }, WithKey(ByType), WithTTL(4*time.Second))
		f.join("a", asynq.Config{Concurrency: 4})
		f.join("b", asynq.Config{Concurrency: 4})
		var infos []*asynq.TaskInfo
		for i := range 20 {
			infos = append(infos, w.Enqueue(asynq.NewTask(k.taskType(), fmt.Append(nil, i)), asynq.MaxRetry(0)))
		}
		w.Until(time.Minute, "all done", func() bool { return w.Drained() })
		k.wantState("gone", infos...)
		if len(k.ran()) != 20 || k.deliveryCount() != 20 {
			t.Errorf("%d runs, %d deliveries, want 20 each: %s", len(k.ran()), k.deliveryCount(), &k.books)
		}
		if took := w.Elapsed(); took > 30*time.Second {
			t.Errorf("20 runs of a second took %v", took)
		}
		f.audit()
	})
}

// Where the policy would do the same on any attempt, there is nothing to wait for.
func TestALastAttemptThatNeedNotWaitDoesNot(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		f := &fleet{World: w}
		decide := func(err error) Policy {
			return PolicyFunc(func(context.Context, *asynq.Task, *HeldError) error { return err })
		}
		broken := errors.New("out of order")
		type want struct {
			kind  EventKind
			state string
			err   error
		}
		wants := map[*work]want{}
		for _, test := range []struct {
			name   string
			policy Policy
			want   want
		}{
			{"Skip", Skip(), want{EventSkipped, "gone", nil}},
			{"Archive", Archive(), want{EventArchived, "archived", asynq.SkipRetry}},
			{"a PolicyFunc that skips", decide(nil), want{EventSkipped, "gone", nil}},
			{"a PolicyFunc that archives", decide(fmt.Errorf("enough: %w", asynq.SkipRetry)), want{EventArchived, "archived", asynq.SkipRetry}},
			{"a PolicyFunc that fails", decide(broken), want{EventRefused, "archived", broken}},
		} {
			k := f.add(test.name, func(context.Context, fleetRun) error { return nil }, WithPolicy(test.policy))
			wants[k] = test.want
			defer k.hold()()
		}
		done := f.add("a done marker", func(context.Context, fleetRun) error { return nil }, WithDoneFor(time.Hour), WithPolicy(Retry(0)))
		wants[done] = want{EventDone, "gone", nil}
		_ = w.Redis.Set(done.key(), encodeValue(Holder{TaskID: "winner", Done: true}, "token"))

		f.join("a", asynq.Config{})
		infos := map[*work]*asynq.TaskInfo{}
		for _, k := range f.works {
			infos[k] = k.enqueue(asynq.MaxRetry(0))
		}
		time.Sleep(2 * time.Second)
		for _, k := range f.works {
			events := k.books.of()
			if len(events) != 1 || events[0].Kind != wants[k].kind || !errors.Is(events[0].Err, wants[k].err) || events[0].Waited > 10*time.Millisecond {
				k.errorf("want only %s, at once, because of %v: %+v", wants[k].kind, wants[k].err, events)
			}
			k.wantState(wants[k].state, infos[k])
		}
		f.audit()
	})
}

func TestAWaitingPolicyFuncIsAskedOncePerHolder(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		f := &fleet{World: w}
		var asked atomic.Int32
		k := f.add("work", func(context.Context, fleetRun) error { return nil }, WithPolicy(PolicyFunc(
			func(_ context.Context, _ *asynq.Task, held *HeldError) error {
				asked.Add(1)
				if held.Holder.TaskID == "third" {
					return nil
				}
				return held
			})))
		by := func(id string) { _ = w.Redis.Set(k.key(), encodeValue(Holder{TaskID: id}, "token of "+id)) }
		by("first")
		f.join("a", asynq.Config{})
		info := k.enqueue(asynq.MaxRetry(0))
		time.Sleep(10 * time.Second)
		if n := asked.Load(); n != 1 {
			t.Errorf("asked %d times about one holder", n)
		}
		by("second")
		time.Sleep(10 * time.Second)
		if n := asked.Load(); n != 2 {
			t.Errorf("asked %d times about two holders", n)
		}
		k.wantState("active", info)
		by("third")
		time.Sleep(time.Second)
		skipped := k.books.of(EventSkipped)
		if asked.Load() != 3 || len(skipped) != 1 || skipped[0].Holder.TaskID != "third" {
			t.Errorf("asked %d times, want 3 and then skipped because of the third: %+v", asked.Load(), skipped)
		}
		k.wantState("gone", info)
		f.audit()
	})
}

func TestAWaitingLastAttemptSurvivesItsServersShutdown(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		f := &fleet{World: w}
		infos := map[*work]*asynq.TaskInfo{}
		releases := map[*work]func(){}
		for _, p := range putBack() {
			k := f.add(p.name, func(context.Context, fleetRun) error { return nil }, WithTTL(4*time.Second), WithPolicy(p.policy))
			releases[k] = k.hold()
		}
		first := f.join("first", asynq.Config{ShutdownTimeout: time.Second})
		for _, k := range f.works {
			infos[k] = k.enqueue(asynq.MaxRetry(0))
		}
		w.Until(5*time.Second, "all waiting", func() bool { return f.all(delivered(1)) })
		time.Sleep(3 * time.Second)
		first.server.Shutdown()
		for _, k := range f.works {
			k.wantState("pending", infos[k])
			outcome := k.books.of()
			if len(outcome) != 1 || outcome[0].Kind != EventRequeued || !errors.Is(outcome[0].Err, context.Canceled) {
				k.errorf("want it requeued since its context ended: %+v", outcome)
			}
		}
		f.join("second", asynq.Config{})
		w.Until(5*time.Second, "all waiting again", func() bool { return f.all(delivered(2)) })
		for _, k := range f.works {
			releases[k]()
		}
		w.Until(5*time.Second, "all done", func() bool { return w.Drained() })
		for _, k := range f.works {
			k.wantState("gone", infos[k])
			if n := len(k.ran()); n != 1 {
				k.errorf("%d runs, want 1", n)
			}
		}
		f.audit()
	})
}

// Fifty contentions take no attempt away: the task still has all of them when it is its turn.
func TestContentionCostsNoAttempts(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		f := &fleet{World: w}
		failThrice := func(_ context.Context, j fleetRun) error {
			if j.nth <= 3 {
				return fmt.Errorf("failure %d", j.nth)
			}
			return nil
		}
		failAlways := func(context.Context, fleetRun) error { return errors.New("always") }
		opts := Options(WithTTL(2*time.Second), WithDoneFor(time.Hour))
		var releases []func()
		for _, p := range []policyCase{{"Wait", Wait(0)}, putBack()[4]} {
			k := f.add(p.name, failThrice, opts, WithPolicy(p.policy))
			releases = append(releases, k.hold())
		}
		doomed := f.add("Retry, fails always", failAlways, opts, WithPolicy(Retry(time.Second)))
		releases = append(releases, doomed.hold())
		unknown := f.add("a lock of an unknown version", failThrice, opts)
		_ = w.Redis.Set(unknown.key(), "redislock/2 ?")
		releases = append(releases, func() { w.Redis.Del(unknown.key()) })
		outage := f.add("Redis out of reach", failThrice, opts, WithPolicy(Retry(time.Second)))

		a := f.join("a", asynq.Config{})
		fault := a.LockLink.Every("SET", outage.key()).Refuse("READONLY You can't write against a read only replica.")
		releases = append(releases, fault.Lift)
		infos := map[*work]*asynq.TaskInfo{}
		for _, k := range f.works {
			infos[k] = k.enqueue(asynq.MaxRetry(3))
		}
		w.Until(3*time.Minute, "50 contentions each", func() bool {
			return f.all(func(k *work) bool { return k.books.count(EventRequeued) >= 50 })
		})
		for _, k := range f.works {
			if len(k.ran()) > 0 {
				k.errorf("it ran without its lock")
			}
			k.wantUntouched(infos[k], 0)
		}
		if s := w.Stats("default"); s.Failed != 0 || s.Processed != 0 {
			t.Errorf("failed %d, processed %d, want neither", s.Failed, s.Processed)
		}
		for _, release := range releases {
			release()
		}
		w.Until(time.Minute, "all done", func() bool { return w.Drained() })
		for _, k := range f.works {
			want := "gone"
			if k == doomed {
				want = "archived"
			}
			k.wantState(want, infos[k])
			if n := len(k.ran()); n != 4 {
				k.errorf("%d runs, want the first and three retries", n)
			}
		}
		if s, want := w.Stats("default"), 3*len(f.works)+1; s.Failed != want {
			t.Errorf("failed %d, want the %d runs that did", s.Failed, want)
		}
		f.audit()
	})
}

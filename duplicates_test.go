package redislock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"example.com/redislock/internal/virtual"
	"github.com/hibiken/asynq"
)

// fleet is a group of hosts that do the same kinds of work under locks. A world costs far more than the work in it, so
// the cases of a table share one where they can, each as a kind of work with locks and accounts of its own.
type fleet struct {
	*virtual.World
	works []*work
	runs  virtual.Tally // by lock key
}

// work is one kind of work that a fleet does, and what came of it.
type work struct {
	name  string
	fleet *fleet
	opts  []Option
	do    func(context.Context, fleetRun) error

	books      books
	mu         sync.Mutex
	deliveries int
	jobs       []fleetRun
	successes  []string // task IDs
}

// fleetRun is one run of the handler of a work.
type fleetRun struct {
	id  string // of the task
	nth int    // among the runs of this work, from 1
	at  *station
}

// station is a host of a fleet.
type station struct {
	*virtual.Host
	fleet   *fleet
	server  *asynq.Server
	lockers map[*work]*Locker

	mu   sync.Mutex
	ends []func() // what the tally is to hear when the host dies
}

// add makes a kind of work known. All of them are to be there before the first host joins.
func (f *fleet) add(name string, do func(context.Context, fleetRun) error, opts ...Option) *work {
	k := &work{name: name, fleet: f, do: do, opts: opts}
	f.works = append(f.works, k)
	return k
}

// join adds a host with a server that knows all the works. A task that fails comes back after a second.
func (f *fleet) join(name string, cfg asynq.Config) *station {
	f.T.Helper()
	s := &station{Host: f.Host(name), fleet: f, lockers: map[*work]*Locker{}}
	if cfg.Concurrency == 0 {
		cfg.Concurrency = 200
	}
	if cfg.TaskCheckInterval == 0 {
		cfg.TaskCheckInterval = time.Second
	}
	cfg.RetryDelayFunc = func(int, error, *asynq.Task) time.Duration { return time.Second }
	mux := asynq.NewServeMux()
	for _, k := range f.works {
		locker := locker(s.Host, &k.books, WithTypes(k.taskType()), Options(k.opts...))
		s.lockers[k] = locker
		f.AtEnd(func() { _ = locker.Shutdown(context.Background()) }) // so that nothing of it is left in the background
		mux.Use(k.countDeliveries, locker.Middleware)
		mux.HandleFunc(k.taskType(), func(ctx context.Context, _ *asynq.Task) error { return k.run(ctx, s) })
	}
	s.server = s.Serve(ServerConfig(cfg), mux)
	return s
}

// kill takes the host from the world: Redis never hears of it again, and what it was doing is over.
func (s *station) kill() {
	s.Cut()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, end := range s.ends {
		end()
	}
}

func (k *work) taskType() string {
	return fmt.Sprintf("%s:%d:", k.name, slices.Index(k.fleet.works, k))
}

func (k *work) task() *asynq.Task { return asynq.NewTask(k.taskType(), []byte(`{"day":"today"}`)) }

func (k *work) enqueue(opts ...asynq.Option) *asynq.TaskInfo {
	k.fleet.T.Helper()
	return k.fleet.Enqueue(k.task(), opts...)
}

func (k *work) countDeliveries(next asynq.Handler) asynq.Handler {
	return asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
		if task.Type() == k.taskType() {
			k.mu.Lock()
			k.deliveries++
			k.mu.Unlock()
		}
		return next.ProcessTask(ctx, task)
	})
}

func (k *work) run(ctx context.Context, s *station) error {
	lock, ok := FromContext(ctx)
	if !ok {
		k.errorf("a handler runs without a lock")
		return nil
	}
	end := k.fleet.runs.Start(lock.Key())
	defer end()
	s.mu.Lock()
	s.ends = append(s.ends, end)
	s.mu.Unlock()

	id, _ := asynq.GetTaskID(ctx)
	k.mu.Lock()
	j := fleetRun{id, len(k.jobs) + 1, s}
	k.jobs = append(k.jobs, j)
	k.mu.Unlock()
	if err := k.do(ctx, j); err != nil {
		return err
	}
	k.mu.Lock()
	k.successes = append(k.successes, id)
	k.mu.Unlock()
	return nil
}

// deliveryCount returns how often a server has handed out a task of this work so far.
func (k *work) deliveryCount() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.deliveries
}

// ran returns the runs so far, in the order in which they began.
func (k *work) ran() []fleetRun {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.jobs)
}

// succeeded returns the IDs of the tasks whose runs have ended well, in that order.
func (k *work) succeeded() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.successes)
}

// key returns the key of the lock that the work's tasks share.
func (k *work) key() string {
	k.fleet.T.Helper()
	l, err := New(k.fleet.RDB, k.opts...)
	if err != nil {
		k.fleet.T.Fatal(err)
	}
	name, _ := l.Name(k.fleet.T.Context(), k.task())
	key, _ := l.redisKey(name)
	return key
}

// errorf fails the test in the name of this work.
func (k *work) errorf(format string, args ...any) {
	k.fleet.T.Helper()
	k.fleet.T.Errorf(k.name+": "+format, args...)
}

// wantState checks what has become of tasks.
func (k *work) wantState(want string, infos ...*asynq.TaskInfo) {
	k.fleet.T.Helper()
	for _, info := range infos {
		if got := k.fleet.State(info); got != want {
			k.errorf("task %s is %s, want %s", info.ID, got, want)
		}
	}
}

// wantMarker checks that the done marker names this task and lapses within d.
func (k *work) wantMarker(id string, d time.Duration) {
	k.fleet.T.Helper()
	value, _ := k.fleet.Redis.Get(k.key())
	h, err := decodeValue(value)
	if err != nil || !h.Done || h.TaskID != id {
		k.errorf("at the key: %q; want the marker of task %s", value, id)
	}
	if ttl := k.fleet.Redis.TTL(k.key()); ttl <= 0 || ttl > d {
		k.errorf("the marker lapses in %v, want within %v", ttl, d)
	}
}

// all reports whether cond holds for every work.
func (f *fleet) all(cond func(k *work) bool) bool {
	return !slices.ContainsFunc(f.works, func(k *work) bool { return !cond(k) })
}

// haveRun is a condition for all.
func haveRun(n int) func(*work) bool { return func(k *work) bool { return len(k.ran()) >= n } }

// audit checks what holds whatever happened: no two runs of one key at once, one outcome for each delivery, one end for
// each lock. Call it when all is quiet.
func (f *fleet) audit() {
	f.T.Helper()
	for _, text := range f.runs.Overlaps() {
		f.T.Errorf("overlap: %s", text)
	}
	for _, k := range f.works {
		k.books.balance(f.T, k.deliveryCount())
	}
}

// nightly is what hosts with a scheduler each do: copies of every work's task arrive one after the other, at five servers.
func (f *fleet) nightly(copies int, every time.Duration, opts ...asynq.Option) map[*work][]*asynq.TaskInfo {
	f.T.Helper()
	infos := map[*work][]*asynq.TaskInfo{}
	for i := range 5 {
		f.join(fmt.Sprintf("h%d", i), asynq.Config{})
	}
	for range copies {
		for _, k := range f.works {
			infos[k] = append(infos[k], k.enqueue(opts...))
		}
		time.Sleep(every)
	}
	return infos
}

func TestTwentyCopiesMakeOneRun(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		f := &fleet{World: w}
		skips := map[*work]bool{}
		for _, test := range []struct {
			name   string
			policy Policy
			work   time.Duration
		}{
			{"Skip, fast", Skip(), 50 * time.Millisecond},
			{"Skip, slow", Skip(), 5 * time.Second},
			{"Retry, fast", Retry(2 * time.Second), 50 * time.Millisecond},
			{"Retry, slow", Retry(2 * time.Second), 5 * time.Second},
			{"the default, slow", Policy{}, 5 * time.Second},
			{"Wait, slow", Wait(2 * time.Second), 5 * time.Second},
		} {
			k := f.add(test.name, func(ctx context.Context, _ fleetRun) error { return virtual.Busy(ctx, test.work) },
				WithTTL(4*time.Second), WithDoneFor(time.Hour), WithPolicy(test.policy))
			skips[k] = test.policy.kind == policySkip
		}
		infos := f.nightly(20, 200*time.Millisecond)
		w.Until(time.Minute, "all copies dealt with", func() bool { return w.Drained() })

		for _, k := range f.works {
			if n := len(k.ran()); n != 1 {
				k.errorf("%d runs, want 1", n)
				continue
			}
			winner := k.ran()[0].id
			k.wantState("gone", infos[k]...)
			k.wantMarker(winner, time.Hour)
			if n := k.books.count(EventSkipped, EventDone); n != 19 || k.books.count(EventSkipped) > 0 && !skips[k] {
				k.errorf("want 19 that are done, or skipped by Skip: %s", &k.books)
			}
			for _, e := range k.books.of(EventSkipped, EventDone, EventRequeued) {
				if e.Holder.TaskID != winner || e.TaskID == winner || e.Holder.Done != (e.Kind == EventDone) {
					k.errorf("task %s was %s because of %+v, want the winner, %s", e.TaskID, e.Kind, e.Holder, winner)
				}
			}
		}
		if s := w.Stats("default"); s.Failed != 0 {
			t.Errorf("failed %d, want none", s.Failed)
		}
		f.audit()
	})
}

func TestAFailedFirstRunIsMadeUpForOnce(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		f := &fleet{World: w}
		anError := func(context.Context) error { return errors.New("no paper") }
		for _, test := range []struct {
			name   string
			policy Policy
			fail   func(context.Context) error
		}{
			{"Skip, an error", Skip(), anError},
			{"Retry, an error", Retry(time.Second), anError},
			{"Retry, a panic", Retry(time.Second), func(context.Context) error { panic("on fire") }},
			{"Retry, a timeout", Retry(time.Second), func(ctx context.Context) error { return virtual.Busy(ctx, time.Hour) }},
			{"Wait, an error", Wait(3 * time.Second), anError},
		} {
			f.add(test.name, func(ctx context.Context, j fleetRun) error {
				if err := virtual.Busy(ctx, 2*time.Second); err != nil || j.nth > 1 {
					return err
				}
				return test.fail(ctx)
			}, WithTTL(6*time.Second), WithDoneFor(time.Hour), WithPolicy(test.policy))
		}
		infos := f.nightly(10, 300*time.Millisecond, asynq.Timeout(5*time.Second))
		w.Until(time.Minute, "all copies dealt with", func() bool { return w.Drained() })

		for _, k := range f.works {
			if n, won := len(k.ran()), k.succeeded(); n != 2 || len(won) != 1 {
				k.errorf("%d runs, %d of them good; want one that fails and one that makes up for it", n, len(won))
				continue
			}
			k.wantState("gone", infos[k]...)
			k.wantMarker(k.succeeded()[0], time.Hour)
		}
		if s := w.Stats("default"); s.Failed != len(f.works) {
			t.Errorf("failed %d, want only the %d runs that did", s.Failed, len(f.works))
		}
		f.audit()
	})
}

func TestACopyDoesTheWorkOfATaskThatFailsForGood(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		f := &fleet{World: w}
		noPaper := errors.New("no paper")
		attempts := map[*work]asynq.Option{}
		for _, test := range []struct {
			name     string
			policy   Policy
			maxRetry int
			err      error
		}{
			{"Retry, SkipRetry", Retry(time.Second), 25, asynq.SkipRetry},
			{"Retry, no attempt left", Retry(time.Second), 0, noPaper},
			{"Wait, SkipRetry", Wait(3 * time.Second), 25, asynq.SkipRetry},
			{"Wait, no attempt left", Wait(3 * time.Second), 0, noPaper},
		} {
			k := f.add(test.name, func(ctx context.Context, j fleetRun) error {
				if err := virtual.Busy(ctx, 3*time.Second); err != nil || j.nth > 1 {
					return err
				}
				return test.err
			}, WithTTL(6*time.Second), WithDoneFor(time.Hour), WithPolicy(test.policy))
			attempts[k] = asynq.MaxRetry(test.maxRetry)
		}
		for i := range 5 {
			f.join(fmt.Sprintf("h%d", i), asynq.Config{})
		}
		infos := map[*work][]*asynq.TaskInfo{}
		for range 10 {
			for _, k := range f.works {
				infos[k] = append(infos[k], k.enqueue(attempts[k]))
			}
			time.Sleep(200 * time.Millisecond)
		}
		w.Until(time.Minute, "all copies dealt with", func() bool { return w.Drained() })

		for _, k := range f.works {
			ran := k.ran()
			if len(ran) != 2 || len(k.succeeded()) != 1 || ran[0].id == ran[1].id {
				k.errorf("runs: %v, good: %v; want one that fails for good and one of a copy", ran, k.succeeded())
				continue
			}
			for _, info := range infos[k] {
				if info.ID == ran[0].id {
					k.wantState("archived", info)
				} else {
					k.wantState("gone", info)
				}
			}
			k.wantMarker(ran[1].id, time.Hour)
			if n := k.books.count(EventDone); n != 8 {
				k.errorf("want 8 done: %s", &k.books)
			}
			for _, e := range k.books.of(EventDone) {
				if e.Holder.TaskID != ran[1].id {
					k.errorf("task %s was done by %s, want the copy %s", e.TaskID, e.Holder.TaskID, ran[1].id)
				}
			}
		}
		f.audit()
	})
}

// This is what doc.go says of Skip's price, and why it is not the default where WithDoneFor is.
func TestSkipTakesTheCopiesAlong(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		f := &fleet{World: w}
		k := f.add("report", func(ctx context.Context, _ fleetRun) error {
			_ = virtual.Busy(ctx, 5*time.Second) // longer than it takes all copies to arrive
			return asynq.SkipRetry
		}, WithDoneFor(time.Hour), WithPolicy(Skip()))
		f.nightly(20, 200*time.Millisecond)
		w.Until(time.Minute, "all copies dealt with", func() bool { return w.Drained() })

		if s := w.Stats("default"); len(k.ran()) != 1 || s.Archived != 1 || k.books.count(EventSkipped) != 19 {
			t.Errorf("%d runs, %d archived, %s; want nothing left but the task that failed", len(k.ran()), s.Archived, &k.books)
		}
		if w.Redis.Exists(k.key()) {
			t.Error("a failed run left something at the key")
		}
		f.audit()
	})
}

func TestAKilledHostsWorkIsDoneOnce(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		f := &fleet{World: w}
		do := func(ctx context.Context, j fleetRun) error {
			if j.nth == 1 {
				<-w.Over
				return errors.New("nobody hears of this")
			}
			return virtual.Busy(ctx, 2*time.Second)
		}
		opts := Options(WithTTL(6*time.Second), WithDoneFor(time.Hour))
		// With these two a copy takes over; Skip has dropped the copies, and asynq recovers the task itself.
		retry := f.add("Retry", do, opts, WithPolicy(Retry(time.Second)))
		wait := f.add("Wait", do, opts, WithPolicy(Wait(3*time.Second)))
		skip := f.add("Skip", do, opts, WithPolicy(Skip()))

		doomed := f.join("doomed", asynq.Config{})
		infos := map[*work][]*asynq.TaskInfo{}
		for _, k := range f.works {
			infos[k] = append(infos[k], k.enqueue())
		}
		w.Until(5*time.Second, "all at work", func() bool { return len(retry.ran())+len(wait.ran())+len(skip.ran()) == 3 })
		f.join("a", asynq.Config{})
		f.join("b", asynq.Config{})
		for _, k := range f.works {
			for range 10 {
				infos[k] = append(infos[k], k.enqueue())
			}
		}
		// Gone, not only skipped: what asynq has not marked as done yet would come back from a host that dies.
		w.Until(10*time.Second, "copies skipped and gone", func() bool {
			return !slices.ContainsFunc(infos[skip][1:], func(info *asynq.TaskInfo) bool { return w.State(info) != "gone" })
		})
		doomed.kill()

		time.Sleep(6*time.Second + 6*time.Second) // the key lapses, and the copies come back
		if len(retry.succeeded()) != 1 || len(wait.succeeded()) != 1 {
			t.Errorf("good runs by copies: %v with Retry, %v with Wait; want one each", retry.succeeded(), wait.succeeded())
		}
		w.Until(3*time.Minute, "everything dealt with", func() bool { return w.Drained() })
		for _, k := range f.works {
			k.wantState("gone", infos[k]...)
			ran, won := k.ran(), k.succeeded()
			if len(ran) != 2 || len(won) != 1 {
				k.errorf("%d runs, %d of them good, want 2 and 1", len(ran), len(won))
				continue
			}
			k.wantMarker(won[0], time.Hour)
			if byItself := won[0] == ran[0].id; byItself != (k == skip) {
				k.errorf("the work was done by the recovered task: %v", byItself)
			}
		}
		if got := f.runs.Overlaps(); len(got) > 0 {
			t.Errorf("overlaps: %q", got)
		}
	})
}

func TestTheMarkerEndsWithItsTime(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		f := &fleet{World: w}
		k := f.add("report", func(ctx context.Context, _ fleetRun) error { return virtual.Busy(ctx, 50*time.Millisecond) },
			WithDoneFor(30*time.Second))
		f.join("a", asynq.Config{})
		for night := 1; night <= 3; night++ {
			for range 4 {
				k.enqueue()
				time.Sleep(9 * time.Second) // the last is gone before the marker is
			}
			if n := len(k.ran()); n != night {
				t.Fatalf("%d runs after night %d", n, night)
			}
		}
		if n := k.books.count(EventDone); n != 3*3 {
			t.Errorf("want 9 done: %s", &k.books)
		}
		f.audit()
	})
}

func TestDifferentReportsDoNotWaitForEachOther(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		f := &fleet{World: w}
		k := f.add("report", func(ctx context.Context, _ fleetRun) error { return virtual.Busy(ctx, 3*time.Second) }, WithDoneFor(time.Hour))
		f.join("a", asynq.Config{})
		f.join("b", asynq.Config{})
		for range 3 {
			for tenant := range 6 {
				w.Enqueue(asynq.NewTask(k.taskType(), fmt.Append(nil, tenant)))
			}
		}
		time.Sleep(5 * time.Second)
		if n := len(k.succeeded()); n != 6 {
			t.Errorf("after 5 s, %d of 6 reports of 3 s are made", n)
		}
		w.Until(time.Minute, "all copies dealt with", func() bool { return w.Drained() })
		if n := len(k.ran()); n != 6 {
			t.Errorf("%d runs, want 6", n)
		}
		f.audit()
	})
}

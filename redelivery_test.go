package redislock

import (
	"context"
	"errors"
	"testing"
	"time"

	"example.com/redislock/internal/virtual"
	"github.com/hibiken/asynq"
)

// policyCase is a policy in a table.
type policyCase struct {
	name   string
	policy Policy
}

// policiesWithoutASay are all policies, for where none of them is to matter.
func policiesWithoutASay(t *testing.T) []policyCase {
	return []policyCase{
		{"Skip", Skip()},
		{"Retry", Retry(2 * time.Second)},
		{"Wait", Wait(10 * time.Second)},
		{"Archive", Archive()},
		{"PolicyFunc", PolicyFunc(func(_ context.Context, _ *asynq.Task, held *HeldError) error {
			t.Errorf("the policy was asked about %v", held)
			return nil
		})},
	}
}

// unhurried is for worlds in which minutes go by.
var unhurried = asynq.Config{
	ShutdownTimeout: time.Second, TaskCheckInterval: 2 * time.Second, DelayedTaskCheckInterval: 2 * time.Second,
}

func delivered(n int) func(*work) bool { return func(k *work) bool { return k.deliveryCount() >= n } }

// wantUntouched checks that nothing but put-back has happened to a task that may have met its own earlier run.
func (k *work) wantUntouched(info *asynq.TaskInfo, retried int) {
	k.fleet.T.Helper()
	if n := k.books.count(EventSkipped, EventDone, EventArchived, EventRefused); n > 0 {
		k.errorf("the redelivery had another outcome than to be put back: %s", &k.books)
	}
	now := k.fleet.Task(info)
	switch {
	case now == nil:
		k.errorf("the task is lost")
	case now.State == asynq.TaskStateArchived:
		k.errorf("the task is archived: %s", now.LastErr)
	case now.Retried != retried:
		k.errorf("retried %d, want %d: contention uses up no attempt", now.Retried, retried)
	}
}

// asynq settles a task, or passes it on, while its handler still runs. What it delivers then is the task's only copy.
func TestARedeliveryWaitsForItsEarlierRun(t *testing.T) {
	for _, loss := range []struct {
		name    string
		lose    func(first *station, infos map[*work]*asynq.TaskInfo)
		timeout time.Duration
		costs   int // attempts, by asynq's own count
	}{
		{"a shutdown", func(first *station, _ map[*work]*asynq.TaskInfo) { first.server.Shutdown() }, time.Hour, 0},
		{"a timeout", func(*station, map[*work]*asynq.TaskInfo) { time.Sleep(20 * time.Second) }, 20 * time.Second, 1},
		{"a cancellation", func(first *station, infos map[*work]*asynq.TaskInfo) {
			for _, info := range infos {
				if err := first.World.Inspector.CancelProcessing(info.ID); err != nil {
					first.World.T.Error(err)
				}
				time.Sleep(10 * time.Millisecond) // asynq settles one task after the other
			}
		}, time.Hour, 1},
		{"a lost lease", func(first *station, _ map[*work]*asynq.TaskInfo) { first.QueueLink.Cut() }, time.Hour, 1},
	} {
		t.Run(loss.name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				f := &fleet{World: w}
				finish := make(chan struct{})
				deafThen := func(result error) func(context.Context, fleetRun) error {
					return func(_ context.Context, j fleetRun) error {
						if j.nth > 1 {
							return nil
						}
						select {
						case <-finish:
						case <-w.Over:
						}
						return result
					}
				}
				var (
					runs     = map[*work]int{}
					attempts = map[*work]asynq.Option{}
					failed   = errors.New("failed after all")
				)
				for _, p := range policiesWithoutASay(t) {
					for _, variant := range []struct {
						name     string
						result   error // of the earlier run
						doneFor  time.Duration
						maxRetry int
						runs     int
					}{
						{"the earlier run succeeds", nil, 0, 25, 2},
						{"the earlier run leaves a marker", nil, time.Hour, 25, 1},
						{"the earlier run leaves no marker", failed, time.Hour, 25, 2},
						{"last attempt", failed, 0, loss.costs, 2},
					} {
						k := f.add(p.name+", "+variant.name, deafThen(variant.result),
							WithTTL(6*time.Second), WithPolicy(p.policy), WithDoneFor(variant.doneFor))
						runs[k], attempts[k] = variant.runs, asynq.MaxRetry(variant.maxRetry)
					}
				}
				first := f.join("first", unhurried)
				infos := map[*work]*asynq.TaskInfo{}
				values := map[*work]string{}
				for _, k := range f.works {
					infos[k] = k.enqueue(attempts[k], asynq.Timeout(loss.timeout))
				}
				w.Until(10*time.Second, "all running", func() bool { return f.all(haveRun(1)) })
				for _, k := range f.works {
					values[k], _ = w.Redis.Get(k.key())
				}
				loss.lose(first, infos)
				f.join("second", unhurried)
				w.Until(3*time.Minute, "all redelivered", func() bool { return f.all(delivered(2)) })
				time.Sleep(7 * time.Second) // more than one contention

				for _, k := range f.works {
					if n := len(k.ran()); n != 1 {
						k.errorf("%d runs while the first one lasts", n)
					}
					if value, _ := w.Redis.Get(k.key()); value != values[k] {
						k.errorf("at the key: %q, was %q", value, values[k])
					}
					k.wantUntouched(infos[k], loss.costs)
					for _, e := range k.books.of(EventRequeued) {
						if !errors.Is(e.Err, ErrHeld) || e.Holder.TaskID != infos[k].ID {
							k.errorf("put back because of %v, holder %v; want the task itself", e.Err, e.Holder)
						}
					}
				}
				close(finish)
				w.Until(15*time.Second, "all settled", func() bool { return w.Drained() })

				for _, k := range f.works {
					k.wantState("gone", infos[k])
					if n := len(k.ran()); n != runs[k] || len(k.succeeded()) == 0 {
						k.errorf("%d runs, good ones: %v; want %d", n, k.succeeded(), runs[k])
					}
					if marked := k.books.count(EventDone); marked != 2-runs[k] {
						k.errorf("%d found the marker, want %d", marked, 2-runs[k])
					}
				}
				if s := w.Stats("default"); s.Failed != loss.costs*len(f.works) {
					t.Errorf("failed %d, want %d for each of %d tasks", s.Failed, loss.costs, len(f.works))
				}
				f.audit()
			})
		})
	}
}

func TestAKilledTaskRunsOnceItsDeadLockHasLapsed(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		f := &fleet{World: w}
		ttls := map[*work]time.Duration{}
		attempts := map[*work]asynq.Option{}
		for _, p := range policiesWithoutASay(t) {
			for _, variant := range []struct {
				name     string
				ttl      time.Duration
				doneFor  time.Duration
				maxRetry int
			}{
				{"", 3 * time.Minute, time.Hour, 25},
				{", last attempt", 3 * time.Minute, 0, 1},
				{", short TTL", 30 * time.Second, 0, 25},
			} {
				k := f.add(p.name+variant.name, func(_ context.Context, j fleetRun) error {
					if j.nth == 1 {
						<-w.Over
					}
					return nil
				}, WithTTL(variant.ttl), WithPolicy(p.policy), WithDoneFor(variant.doneFor))
				ttls[k], attempts[k] = variant.ttl, asynq.MaxRetry(variant.maxRetry)
			}
		}
		first := f.join("first", unhurried)
		infos := map[*work]*asynq.TaskInfo{}
		for _, k := range f.works {
			infos[k] = k.enqueue(attempts[k])
		}
		w.Until(10*time.Second, "all running", func() bool { return f.all(haveRun(1)) })
		first.kill()
		f.join("second", unhurried)

		w.Until(170*time.Second, "all redelivered", func() bool { return f.all(delivered(2)) })
		for _, k := range f.works {
			if ttls[k] > time.Minute {
				k.wantUntouched(infos[k], 1)
			}
		}
		w.Until(5*time.Minute, "all settled", func() bool { return w.Drained() })
		for _, k := range f.works {
			k.wantState("gone", infos[k])
			runs := f.runs.Of(k.key())
			if len(runs) != 2 {
				k.errorf("%d runs, want 2", len(runs))
				continue
			}
			if pause := runs[1].Start.Sub(runs[0].Start); pause < ttls[k] || pause > max(2*time.Minute, ttls[k]*16/10)+10*time.Second {
				k.errorf("the second run began %v after the first, with a TTL of %v", pause, ttls[k])
			}
			if met := k.books.count(EventRequeued); ttls[k] <= 30*time.Second && met != 0 {
				k.errorf("with a TTL of 30 s a task does not meet its own dead lock, but did %d times", met)
			}
		}
		if s := w.Stats("default"); s.Failed != len(f.works) {
			t.Errorf("failed %d, want one lost lease for each of %d tasks", s.Failed, len(f.works))
		}
		if got := f.runs.Overlaps(); len(got) > 0 {
			t.Errorf("overlaps: %q", got)
		}
	})
}

// During a rolling deployment a newer version of this package may hold the lock, perhaps for this very task.
func TestALockOfAnUnknownVersionIsNeverSkipped(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		f := &fleet{World: w}
		attempts := map[*work]asynq.Option{}
		for _, p := range policiesWithoutASay(t) {
			for _, variant := range []struct {
				name     string
				doneFor  time.Duration
				maxRetry int
			}{
				{"", 0, 25},
				{", done marker", time.Hour, 25},
				{", last attempt", 0, 0},
			} {
				k := f.add(p.name+variant.name, func(context.Context, fleetRun) error { return nil },
					WithTTL(4*time.Second), WithPolicy(p.policy), WithDoneFor(variant.doneFor))
				attempts[k] = asynq.MaxRetry(variant.maxRetry)
			}
		}
		const value = `redislock/2 {"done":true,"who":"knows"}`
		const lapses = 12 * time.Second
		infos := map[*work]*asynq.TaskInfo{}
		f.join("a", asynq.Config{})
		f.join("b", asynq.Config{})
		for _, k := range f.works {
			_ = w.Redis.Set(k.key(), value)
			w.Redis.SetTTL(k.key(), lapses)
			infos[k] = k.enqueue(attempts[k])
		}
		time.Sleep(lapses - time.Second)
		for _, k := range f.works {
			if n := len(k.ran()); n > 0 {
				k.errorf("%d runs under somebody else's lock", n)
			}
			k.wantUntouched(infos[k], 0)
			for _, e := range k.books.of(EventRequeued) {
				if !errors.Is(e.Err, ErrHeld) || e.Holder != (Holder{}) {
					k.errorf("put back because of %v, holder %v; want a holder that cannot be read", e.Err, e.Holder)
				}
			}
			if now, _ := w.Redis.Get(k.key()); now != value || w.Redis.TTL(k.key()) > time.Second {
				k.errorf("the other's lock is %q now, with %v to live", now, w.Redis.TTL(k.key()))
			}
		}
		w.Until(10*time.Second, "all done", func() bool { return w.Drained() })
		for _, k := range f.works {
			k.wantState("gone", infos[k])
			if n := len(k.ran()); n != 1 {
				k.errorf("%d runs, want 1", n)
			}
		}
		if s := w.Stats("default"); s.Failed != 0 {
			t.Errorf("failed %d, want none", s.Failed)
		}
		f.audit()
	})
}

// IDs are unique in a queue only.
func TestTheSameIDInAnotherQueueIsAnotherTask(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		f := &fleet{World: w}
		k := f.add("work", func(ctx context.Context, _ fleetRun) error { return virtual.Busy(ctx, 20*time.Second) }, WithPolicy(Skip()))
		f.join("a", asynq.Config{Queues: map[string]int{"default": 1, "other": 1}})
		k.enqueue(asynq.TaskID("7"))
		w.Until(5*time.Second, "running", func() bool { return len(k.ran()) == 1 })
		k.enqueue(asynq.TaskID("7"), asynq.Queue("other"))
		time.Sleep(5 * time.Second)
		skipped := k.books.of(EventSkipped)
		if len(skipped) != 1 || skipped[0].Queue != "other" || skipped[0].Holder.Queue != "default" {
			t.Errorf("want the one in the other queue skipped: %+v, %s", skipped, &k.books)
		}
		w.Until(time.Minute, "done", func() bool { return w.Drained("default", "other") })
		f.audit()
	})
}

func TestASuccessThatAsynqCouldNotRecordIsNotRepeated(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		f := &fleet{World: w}
		for _, p := range policiesWithoutASay(t) {
			f.add(p.name, func(_ context.Context, j fleetRun) error {
				w.Deaf(time.Duration(j.nth) * 3 * time.Second)
				return nil
			}, WithPolicy(p.policy), WithDoneFor(time.Hour))
		}
		first := f.join("first", unhurried)
		infos := map[*work]*asynq.TaskInfo{}
		for _, k := range f.works {
			infos[k] = k.enqueue()
		}
		w.Until(10*time.Second, "all running", func() bool { return f.all(haveRun(1)) })
		first.QueueLink.Cut()
		f.join("second", unhurried)
		time.Sleep(5 * time.Second)
		for _, k := range f.works {
			if len(k.succeeded()) != 1 {
				k.errorf("not done yet")
			}
			k.wantState("active", infos[k])
		}
		w.Until(3*time.Minute, "all settled", func() bool { return w.Drained() })
		for _, k := range f.works {
			k.wantState("gone", infos[k])
			done := k.books.of(EventDone)
			if len(k.ran()) != 1 || len(done) != 1 || done[0].Holder.TaskID != infos[k].ID {
				k.errorf("%d runs, %s; want 1, and the redelivery to find its own marker", len(k.ran()), &k.books)
			}
		}
		f.audit()
	})
}

func TestARedeliveryRunsWhenTheGraceOfADeafHandlerHasEnded(t *testing.T) {
	for name, result := range map[string]error{"then succeeds": nil, "then fails": errors.New("too late anyway")} {
		t.Run(name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				const (
					ttl   = 6 * time.Second
					grace = 20 * time.Second
				)
				f := &fleet{World: w}
				finish := make(chan struct{})
				k := f.add("work", func(ctx context.Context, j fleetRun) error {
					if j.nth > 1 {
						return virtual.Busy(ctx, 20*time.Second)
					}
					select {
					case <-finish:
					case <-w.Over:
					}
					return result
				}, WithTTL(ttl), WithGracePeriod(grace), WithDoneFor(time.Hour))
				first := f.join("first", asynq.Config{ShutdownTimeout: time.Second})
				info := k.enqueue()
				w.Until(5*time.Second, "running", func() bool { return len(k.ran()) == 1 })
				first.server.Shutdown()
				requeued := time.Now()
				f.join("second", asynq.Config{})

				time.Sleep(grace - 100*time.Millisecond)
				if ttlLeft := w.Redis.TTL(k.key()); len(k.ran()) != 1 || ttlLeft < ttl/2 {
					t.Fatalf("before the grace has ended: %d runs, the key lives for %v more", len(k.ran()), ttlLeft)
				}
				w.Until(2*ttl, "second run", func() bool { return len(k.ran()) == 2 })
				if after := time.Since(requeued); after > grace+ttl+ttl*6/10+2*time.Second {
					t.Errorf("the second run began after %v", after)
				}
				if n := k.books.count(EventAbandoned); n != 1 {
					t.Errorf("%d abandoned, want 1: %s", n, &k.books)
				}
				// The first one comes back to a lock that is another's.
				theirs, _ := w.Redis.Get(k.key())
				first.LockLink.Forget()
				close(finish)
				time.Sleep(time.Second)
				if now, _ := w.Redis.Get(k.key()); now != theirs {
					t.Errorf("at the key: %q, was %q", now, theirs)
				}
				if n := len(first.LockLink.Sent(extendScript.Hash())); n > 0 {
					t.Errorf("the abandoned lock was extended %d times", n)
				}
				w.Until(time.Minute, "gone", func() bool { return w.State(info) == "gone" })
				k.wantMarker(info.ID, time.Hour)
				if got := f.runs.Overlaps(); len(got) != 1 {
					t.Errorf("overlaps: %q; want the one that the end of the grace allows", got)
				}
				k.books.balance(t, k.deliveryCount())
			})
		})
	}
}

// The lock is asked for, the server shuts down and hands the task on, and only then does Redis answer.
func TestATaskHandedOnDuringItsAcquireRunsOnce(t *testing.T) {
	for name, fault := range map[string]func(*virtual.Fault){
		"late request":   func(f *virtual.Fault) { f.Delay(3 * time.Second) },
		"late reply":     func(f *virtual.Fault) { f.DelayReply(3 * time.Second) },
		"no reply":       func(f *virtual.Fault) { f.SwallowReply() },
		"broken request": func(f *virtual.Fault) { f.SwallowRequest() },
	} {
		t.Run(name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				const ttl = time.Minute
				f := &fleet{World: w}
				k := f.add("work", func(ctx context.Context, _ fleetRun) error { return virtual.Busy(ctx, 4*time.Second) },
					WithTTL(ttl), WithPolicy(Skip()))
				first := f.join("first", asynq.Config{ShutdownTimeout: time.Second})
				fault(first.LockLink.Next("SET", k.key()))
				info := k.enqueue()
				w.Until(5*time.Second, "asked for", func() bool { return len(first.LockLink.Sent("SET", k.key())) == 1 })
				first.server.Shutdown()
				k.wantState("pending", info)
				second := f.join("second", asynq.Config{})
				w.Until(50*time.Second, "gone, before what the first host claimed would have lapsed", func() bool { return w.State(info) == "gone" })

				ran := k.ran()
				if len(ran) != 1 || ran[0].at != second {
					t.Fatalf("runs: %v, want one, on the second host", ran)
				}
				if n := k.books.count(EventSkipped, EventArchived, EventRefused); n > 0 {
					t.Errorf("want nothing but put-backs: %s", &k.books)
				}
				time.Sleep(5 * time.Second)
				if w.Redis.Exists(k.key()) {
					t.Error("what was claimed for nobody is still at the key")
				}
				f.audit()
			})
		})
	}
}

package redislock

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"example.com/redislock/internal/virtual"
	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
)

// k1 is the key of the lock "n".
const k1 = "redislock:{n}"

// heldLock takes the lock of a name or ends the test.
func heldLock(t *testing.T, l *Locker, name string) *Lock {
	t.Helper()
	k, err := l.TryAcquire(t.Context(), name)
	if err != nil {
		t.Fatalf("the lock of %s should be free: %v", name, err)
	}
	return k
}

// stopWatchdog leaves the lock as it is when its process stands still: nobody extends it and nobody notices.
func stopWatchdog(k *Lock) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.stopWatchdog()
}

// teachScripts makes Redis know the scripts, so that each call is one command.
func teachScripts(w *virtual.World) {
	for _, source := range []string{acquireSource, extendSource, releaseSource, doneSource} {
		if err := w.RDB.ScriptLoad(w.T.Context(), source).Err(); err != nil {
			w.T.Fatal(err)
		}
	}
}

// patient is a client that waits for a reply for ever and never sends a command again.
func patient(o *redis.Options) { o.ReadTimeout, o.WriteTimeout, o.MaxRetries = -1, -1, -1 }

// once is a client that never sends a command again.
func once(o *redis.Options) { o.MaxRetries = -1 }

// keeping is a client that keeps the deadlines of contexts.
func keeping(o *redis.Options) { o.ContextTimeoutEnabled = true }

// ended reports whether the lock's context has ended.
func ended(k *Lock) bool { return k.Context().Err() != nil }

// receive returns what comes out of a channel within limit, or ends the test.
func receive[T any](t *testing.T, limit time.Duration, what string, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(limit):
		t.Fatalf("after %s still not: %s", limit, what)
		panic("unreachable")
	}
}

// awaitEnd waits for the end of the lock's context, and until everybody has been told.
func awaitEnd(k *Lock) {
	<-k.Context().Done()
	synctest.Wait()
}

// service is a host that runs one kind of task under locks, and what became of each delivery.
type service struct {
	books   books
	host    *virtual.Host
	locker  *Locker
	task    *asynq.Task
	key     string
	handler asynq.Handler
	began   chan time.Time // when a handler began

	mu      sync.Mutex
	open    int // deliveries under way
	results []result
}

// result is what the middleware returned, and how long after the handler did.
type result struct {
	err  error
	late time.Duration
}

// lockedService prepares a host for doing work under locks.
func lockedService(h *virtual.Host, work func(context.Context) error, opts ...Option) *service {
	h.World.T.Helper()
	s := &service{host: h, task: asynq.NewTask("work", []byte("the same each time")), began: make(chan time.Time, 100)}
	s.locker = locker(h, &s.books, opts...)
	name, err := s.locker.Name(h.World.T.Context(), s.task)
	if err != nil {
		h.World.T.Fatal(err)
	}
	s.key, _ = s.locker.redisKey(name)
	s.handler = asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
		s.mu.Lock()
		s.open++
		s.mu.Unlock()
		var done time.Time
		err := s.locker.Middleware(asynq.HandlerFunc(func(ctx context.Context, _ *asynq.Task) error {
			s.began <- time.Now()
			defer func() { done = time.Now() }()
			return work(ctx)
		})).ProcessTask(ctx, task)
		s.mu.Lock()
		defer s.mu.Unlock()
		s.open--
		s.results = append(s.results, result{err, time.Since(done)})
		return err
	})
	return s
}

// start starts the host's server, which finds at once what is enqueued by then, and later tasks within seconds.
func (s *service) start() {
	s.host.World.T.Helper()
	s.host.Serve(ServerConfig(asynq.Config{
		Concurrency: 2, TaskCheckInterval: 5 * time.Second, DelayedTaskCheckInterval: 5 * time.Second,
	}), s.handler)
}

// run enqueues the task, starts the server, and returns when the handler has begun.
func (s *service) run(opts ...asynq.Option) (info *asynq.TaskInfo, began time.Time) {
	s.host.World.T.Helper()
	info = s.host.World.Enqueue(s.task, opts...)
	s.start()
	return info, receive(s.host.World.T, time.Minute, "handler runs", s.began)
}

func (s *service) returned() []result {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.results)
}

// finishes lets time pass until all tasks are done and the last release has ended, and checks the books.
func (s *service) finishes(limit time.Duration) {
	w := s.host.World
	w.T.Helper()
	w.Until(limit, "all tasks settled and locks ended", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return w.Drained() && s.open == 0 && s.books.count(EventReleased, EventLost, EventAbandoned) == s.books.count(EventAcquired)
	})
	s.books.balance(w.T, len(s.returned()))
}

// A handler that takes longer than its lock's TTL.

func TestAHandlerOfThreeTTLsNeverRunsTwiceAtOnce(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		const ttl = 5 * time.Second
		var runs virtual.Tally
		var hosts []*service
		for i := range 3 {
			hosts = append(hosts, lockedService(w.Host(fmt.Sprintf("h%d", i)), func(ctx context.Context) error {
				defer runs.Start("work")()
				return virtual.Busy(ctx, 3*ttl)
			}, WithTTL(ttl), WithPolicy(Retry(time.Second))))
		}
		first := hosts[0]
		for range 4 {
			w.Enqueue(first.task)
		}
		for _, s := range hosts {
			s.start()
		}
		w.Until(4*3*ttl+time.Minute, "all copies done", func() bool {
			synctest.Wait()
			if runs.Running("work") > 0 && !w.Redis.Exists(first.key) {
				t.Errorf("at %s the handler runs and the key is gone", w.Elapsed())
			}
			return w.Drained()
		})
		if got := runs.Overlaps(); len(got) > 0 {
			t.Errorf("ran twice at once: %q", got)
		}
		for _, r := range runs.Of("work") {
			if took := r.End.Sub(r.Start); took != 3*ttl {
				t.Errorf("a run took %s, want %s: nothing should have ended it", took, 3*ttl)
			}
		}
		if n := runs.Count("work"); n != 4 {
			t.Errorf("4 copies ran %d times", n)
		}
		if w.Redis.Exists(first.key) {
			t.Error("the key is still there")
		}
		if s := w.Stats("default"); s.Failed != 0 {
			t.Errorf("%d failures; contention is none", s.Failed)
		}
		for _, s := range hosts {
			s.books.balance(t, len(s.returned()))
		}
	})
}

func TestAHolderPausedPastItsTTLLeavesItsSuccessorAlone(t *testing.T) {
	const ttl = 5 * time.Second
	for _, test := range []struct {
		name string
		late func(context.Context, *Lock) error // what the holder does when it wakes up
		asks bool                               // Redis
	}{
		{"release", func(ctx context.Context, k *Lock) error { return k.Release(ctx) }, true},
		{"release with a done marker", func(_ context.Context, k *Lock) error { <-k.release(true); return k.err }, true},
		{"extend", func(ctx context.Context, k *Lock) error { return k.extend(ctx) }, true},
		{"alarm", func(_ context.Context, k *Lock) error { k.tryAgain(); synctest.Wait(); return k.isLost() }, false},
		{"check", func(ctx context.Context, k *Lock) error { return k.Check(ctx) }, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				opts := Options(WithTTL(ttl), WithDoneFor(time.Hour))
				paused, other := w.Host("paused"), w.Host("other")
				old := heldLock(t, locker(paused, &b, opts), "n")
				stopWatchdog(old)
				time.Sleep(ttl - time.Millisecond)
				if _, err := locker(other, &b, opts).TryAcquire(t.Context(), "n"); !errors.Is(err, ErrHeld) {
					t.Errorf("within the TTL the other host gets %v, want ErrHeld", err)
				}
				time.Sleep(2 * time.Millisecond)
				successor := heldLock(t, locker(other, &b, opts), "n")
				time.Sleep(time.Second)
				value, _ := w.Redis.Get(old.Key())
				paused.LockLink.Forget()

				if err := test.late(t.Context(), old); !errors.Is(err, ErrLost) {
					t.Errorf("the old holder hears %v, want ErrLost", err)
				}
				if asked := len(paused.LockLink.Sent("", old.Key())) > 0; asked != test.asks {
					t.Errorf("Redis was asked: %t, want %t", asked, test.asks)
				}
				if now, _ := w.Redis.Get(old.Key()); now != value || now != valueOf(successor) {
					t.Errorf("the key holds %s, want the successor's %s", now, value)
				}
				if left := w.Redis.TTL(old.Key()); left != ttl-time.Second {
					t.Errorf("the successor's TTL is %s, want %s", left, ttl-time.Second)
				}
				if cause := context.Cause(old.Context()); !errors.Is(cause, ErrLost) {
					t.Errorf("the old holder's context ended by %v, want ErrLost", cause)
				}
				if err := successor.Check(t.Context()); err != nil {
					t.Errorf("the successor's lock: %v", err)
				}
				_ = old.Release(t.Context())
				if err := successor.Release(t.Context()); err != nil {
					t.Errorf("the successor's release: %v", err)
				}
				b.balance(t, 0)
				if n := b.count(EventLost); n != 1 {
					t.Errorf("the loss was told %d times", n)
				}
			})
		})
	}
}

// What a holder sent in time can still arrive when the lock is somebody else's.
func TestACommandHeldUpInTheNetworkLeavesTheSuccessorAlone(t *testing.T) {
	const ttl = 5 * time.Second
	for _, test := range []struct {
		name   string
		script *script
		end    func(*Lock)
	}{
		{"extend", extendScript, func(*Lock) {}},
		{"release", releaseScript, func(k *Lock) { k.release(false) }},
		{"release with a done marker", doneScript, func(k *Lock) { k.release(true) }},
	} {
		t.Run(test.name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				teachScripts(w)
				opts := Options(WithTTL(ttl), WithDoneFor(time.Hour))
				slow, other := w.Host("slow", once), w.Host("other")
				old := heldLock(t, locker(slow, &b, opts), "n")
				late := slow.LockLink.Every(test.script.Hash()).Delay(2 * ttl)
				test.end(old)
				time.Sleep(ttl + time.Millisecond)

				const rest = time.Minute
				successor := heldLock(t, locker(other, &b, WithTTL(rest)), "n")
				stopWatchdog(successor) // so that its TTL only goes down
				for taken := time.Now(); time.Since(taken) < 4*ttl; time.Sleep(100 * time.Millisecond) {
					if now, _ := w.Redis.Get(old.Key()); now != valueOf(successor) {
						t.Fatalf("the key holds %q, want the successor's", now)
					}
					if left, want := w.Redis.TTL(old.Key()), rest-time.Since(taken); left != want {
						t.Fatalf("the successor's TTL is %s, want %s", left, want)
					}
				}
				if late.Hits() == 0 {
					t.Error("nothing was held up")
				}
				slow.LockLink.Heal()
				_ = old.Release(t.Context())
				_ = successor.Release(t.Context())
				time.Sleep(ttl)
				b.balance(t, 0)
			})
		})
	}
}

// Replies that get lost.

// lostReplies are the ways in which a client can miss a reply: it notices, or it does not.
var lostReplies = map[string]func(*virtual.Fault) *virtual.Fault{
	"connection breaks": (*virtual.Fault).LoseReply,
	"silence":           (*virtual.Fault).SwallowReply,
}

func TestALostReplyOfTheAcquireIsNoContention(t *testing.T) {
	for name, lose := range lostReplies {
		t.Run(name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				const ttl = 30 * time.Second
				var runs virtual.Tally
				h := w.Host("h")
				s := lockedService(h, func(ctx context.Context) error {
					defer runs.Start("work")()
					k, _ := FromContext(ctx)
					if value, _ := w.Redis.Get(k.Key()); value != valueOf(k) {
						t.Errorf("the handler runs while the key holds %q", value)
					}
					if left := w.Redis.TTL(k.Key()); left != ttl {
						t.Errorf("the handler begins with %s left of its TTL, want all of %s", left, ttl)
					}
					return nil
				}, WithTTL(ttl))
				lost := lose(h.LockLink.Next("SET", s.key))
				info, _ := s.run()
				w.Until(30*time.Second, "task gone", func() bool { return w.State(info) == "gone" })
				s.finishes(time.Second)
				sets := h.LockLink.Sent("SET", s.key)
				if lost.Hits() != 1 || len(sets) != 2 || sets[0].Args[1] != sets[1].Args[1] {
					t.Errorf("want the same SET twice, its first reply lost: %v", sets)
				}
				if runs.Count("work") != 1 || s.books.count(EventRan) != 1 || w.Stats("default").Failed != 0 {
					t.Errorf("ran %d times: %s", runs.Count("work"), &s.books)
				}
				if w.Redis.Exists(s.key) {
					t.Error("the key is still there")
				}
			})
		})
	}
}

// Where go-redis does not find out by itself, the claim is given back, and does not stand in the way for a whole TTL.
func TestAnAcquireWithUnknownOutcomeIsGivenBack(t *testing.T) {
	for _, test := range []struct {
		name  string
		tune  func(*redis.Options)
		fault func(*virtual.Fault) *virtual.Fault
		ttl   time.Duration
		freed time.Duration // when, at the latest
	}{
		{"connection breaks, not sent again", once, (*virtual.Fault).LoseReply, 30 * time.Second, 0},
		{"silence, not sent again", once, (*virtual.Fault).SwallowReply, 30 * time.Second, 3 * time.Second},
		{"silence for more than TTL/4", func(*redis.Options) {}, (*virtual.Fault).SwallowReply, 8 * time.Second, 3100 * time.Millisecond},
		{"held up for more than TTL/4", once, func(f *virtual.Fault) *virtual.Fault { return f.Delay(2100 * time.Millisecond) }, 8 * time.Second, 2100 * time.Millisecond},
		{"reply held up for more than TTL/4", once, func(f *virtual.Fault) *virtual.Fault { return f.DelayReply(2100 * time.Millisecond) }, 8 * time.Second, 2100 * time.Millisecond},
	} {
		t.Run(test.name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var runs virtual.Tally
				h := w.Host("h", test.tune)
				s := lockedService(h, func(context.Context) error {
					runs.Start("work")()
					return nil
				}, WithTTL(test.ttl))
				test.fault(h.LockLink.Next("SET", s.key))
				info := w.Enqueue(s.task, asynq.MaxRetry(1))
				s.start()
				w.Until(10*time.Second, "SET sent", func() bool { return len(h.LockLink.Sent("SET", s.key)) > 0 })
				sent := h.LockLink.Sent("SET", s.key)[0].At
				time.Sleep(time.Until(sent.Add(test.freed + time.Millisecond)))
				if w.Redis.Exists(s.key) {
					t.Errorf("%s after it was sent, the claim is still there", time.Since(sent))
				}
				w.Until(10*time.Second, "the try over", func() bool { return len(s.returned()) == 1 })
				if err := s.returned()[0].err; !errors.Is(err, ErrUnavailable) || runs.Count("work") != 0 {
					t.Errorf("ran %d times, error is %v; want 0 and ErrUnavailable", runs.Count("work"), err)
				}
				if now := w.Task(info); now == nil || now.Retried != 0 {
					t.Errorf("the task is %+v, want put back and not counted", now)
				}
				s.finishes(2 * test.ttl)
				if runs.Count("work") != 1 {
					t.Errorf("ran %d times, want once in the end", runs.Count("work"))
				}
			})
		})
	}
}

func TestTroubleWithTheReleaseIsNoTroubleOfTheHandler(t *testing.T) {
	const work = time.Second
	errWork := errors.New("the work failed")
	endings := []struct {
		name    string
		script  *script
		result  error
		doneFor time.Duration
	}{
		{"done marker", doneScript, nil, time.Hour},
		{"success without marker", releaseScript, nil, 0},
		{"failure", releaseScript, errWork, time.Hour},
	}
	troubles := []struct {
		name  string
		tune  func(*redis.Options)
		fault func(*virtual.Fault) *virtual.Fault
		gone  time.Duration // the key freed, or its marker there, after the handler's end
	}{
		{"reply lost, connection breaks", nil, (*virtual.Fault).LoseReply, 0},
		{"reply lost, silence", nil, (*virtual.Fault).SwallowReply, 0},
		{"request lost, connection breaks", nil, (*virtual.Fault).LoseRequest, 50 * time.Millisecond},
		{"request lost, silence", nil, (*virtual.Fault).SwallowRequest, 3100 * time.Millisecond},
		{"refused for now", once, func(f *virtual.Fault) *virtual.Fault {
			return f.Refuse("LOADING Redis is loading the dataset in memory")
		}, time.Second},
		{"refused for good", nil, func(f *virtual.Fault) *virtual.Fault { return f.Refuse("NOPERM no permission") }, -1}, // lapses
		{"reply lost, never returns", patient, (*virtual.Fault).SwallowReply, 0},
		{"request lost, never returns", patient, (*virtual.Fault).SwallowRequest, -1}, // lapses
		{"held up for long", patient, func(f *virtual.Fault) *virtual.Fault { return f.Delay(3 * time.Second) }, 3 * time.Second},
	}
	for _, ttl := range []time.Duration{5 * time.Second, 30 * time.Second} {
		bound := min(2*time.Second, ttl/10)
		for _, ending := range endings {
			if ttl > 5*time.Second && ending.script != doneScript {
				continue // the bound is the same for all
			}
			for _, trouble := range troubles {
				t.Run(fmt.Sprintf("%s/%s/%s", ttl, ending.name, trouble.name), func(t *testing.T) {
					virtual.Run(t, func(t *testing.T, w *virtual.World) {
						teachScripts(w)
						if trouble.tune == nil {
							trouble.tune = func(*redis.Options) {}
						}
						h := w.Host("h", trouble.tune)
						s := lockedService(h, func(ctx context.Context) error {
							_ = virtual.Busy(ctx, work)
							return ending.result
						}, WithTTL(ttl), WithDoneFor(ending.doneFor))
						f := trouble.fault(h.LockLink.Next(ending.script.Hash(), s.key))
						_, began := s.run(asynq.MaxRetry(0))
						w.Until(10*time.Second, "handler's return", func() bool { return len(s.returned()) == 1 })
						if r := s.returned()[0]; !errors.Is(r.err, ending.result) || errors.Is(r.err, ErrUnavailable) {
							t.Errorf("the middleware returns %v, want the handler's %v", r.err, ending.result)
						} else if r.late > bound {
							t.Errorf("it returns %s after the handler, want %s at most", r.late, bound)
						}
						if trouble.gone < 0 {
							trouble.gone = ttl - work
						}
						time.Sleep(time.Until(began.Add(work + trouble.gone + time.Millisecond)))
						value, _ := w.Redis.Get(s.key)
						holder, _ := decodeValue(value)
						lapses := trouble.gone == ttl-work
						switch {
						case ending.script == doneScript && !lapses:
							if !holder.Done || w.Redis.TTL(s.key) < 59*time.Minute {
								t.Errorf("the key holds %q, want a done marker", value)
							}
						case value != "":
							t.Errorf("the key holds %q, want nothing", value)
						}
						if f.Hits() != 1 {
							t.Errorf("the fault met %d commands", f.Hits())
						}
						h.LockLink.Heal()
						s.finishes(ttl)
						s.books.want(t, "acquired=1 ran=1 released=1")
					})
				})
			}
		}
	}
}

// The release is sent again when its reply is lost, and by then the next holder may be there.
func TestAReleaseSentAgainLeavesAQuickSuccessorAlone(t *testing.T) {
	for _, doneFor := range []time.Duration{0, time.Hour} {
		t.Run(fmt.Sprintf("done for %s", doneFor), func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				const rest = time.Minute
				var b books
				teachScripts(w)
				h, other := w.Host("h"), w.Host("other")
				next := locker(other, &b, WithTTL(rest))
				taken := make(chan *Lock, 1)
				script := releaseScript
				if doneFor > 0 {
					script = doneScript
				}
				h.LockLink.Next(script.Hash()).After(func() {
					w.Redis.Del(k1) // the marker, if there is one
					k, err := next.TryAcquire(t.Context(), "n")
					if err != nil {
						t.Error(err)
					}
					taken <- k
				}).SwallowReply()
				err := locker(h, &b, WithDoneFor(doneFor)).Do(t.Context(), "n", func(context.Context) error { return nil })
				if err != nil {
					t.Errorf("Do returns %v", err)
				}
				successor := <-taken
				time.Sleep(10 * time.Second)
				if n := len(h.LockLink.Sent(script.Hash())); n != 2 {
					t.Errorf("sent %d times, want it sent again", n)
				}
				if value, _ := w.Redis.Get(k1); value != valueOf(successor) || w.Redis.TTL(k1) != rest-w.Elapsed() {
					t.Errorf("the key holds %q with TTL %s, want the successor's and %s", value, w.Redis.TTL(k1), rest-w.Elapsed())
				}
				if err := errors.Join(successor.Check(t.Context()), successor.Release(t.Context())); err != nil {
					t.Errorf("the successor's lock: %v", err)
				}
				b.balance(t, 0)
			})
		})
	}
}

func TestALostReplyOfAnExtendChangesNothing(t *testing.T) {
	const ttl = 30 * time.Second
	for _, test := range []struct {
		name  string
		tune  []func(*redis.Options)
		fault func(*virtual.Fault) *virtual.Fault
	}{
		{"reply lost, connection breaks", nil, (*virtual.Fault).LoseReply},
		{"reply lost, silence", nil, (*virtual.Fault).SwallowReply},
		{"request lost, connection breaks", nil, (*virtual.Fault).LoseRequest},
		{"request lost, silence", nil, (*virtual.Fault).SwallowRequest},
		{"reply lost, never returns", []func(*redis.Options){patient}, (*virtual.Fault).SwallowReply},
		{"request lost, never returns", []func(*redis.Options){patient}, (*virtual.Fault).SwallowRequest},
		{"reply lost, not sent again", []func(*redis.Options){once}, (*virtual.Fault).LoseReply},
	} {
		t.Run(test.name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var runs virtual.Tally
				h := w.Host("h", test.tune...)
				s := lockedService(h, func(ctx context.Context) error {
					defer runs.Start("work")()
					return virtual.Busy(ctx, 3*ttl)
				}, WithTTL(ttl))
				s.run(asynq.MaxRetry(0))
				f := test.fault(h.LockLink.Next(extendScript.Hash(), s.key))
				w.Until(4*ttl, "handler's return", func() bool {
					synctest.Wait()
					if runs.Running("work") > 0 && !w.Redis.Exists(s.key) {
						t.Errorf("at %s the key is gone", w.Elapsed())
					}
					return len(s.returned()) == 1
				})
				if err := s.returned()[0].err; err != nil {
					t.Errorf("the handler was disturbed: %v", err)
				}
				if f.Hits() != 1 {
					t.Errorf("the fault met %d commands", f.Hits())
				}
				h.LockLink.Heal()
				s.finishes(ttl)
				s.books.want(t, "acquired=1 ran=1 released=1")
			})
		})
	}
}

// Locks that are lost.

// stop is how a handler saw its context end.
type stop struct {
	at    time.Time
	cause error
	left  time.Duration // of the key's TTL
}

func TestAHandlerWhoseKeyIsTakenAwayIsToldWithinAThirdOfTheTTL(t *testing.T) {
	const (
		ttl       = 6 * time.Second
		roundTrip = 100 * time.Millisecond
	)
	another := encodeValue(Holder{TaskID: "another", Host: "elsewhere", PID: 1}, "its token")
	for name, tamper := range map[string]func(w *virtual.World, l *Locker, key string) (left string){
		"deleted":   func(w *virtual.World, _ *Locker, key string) string { w.Redis.Del(key); return "" },
		"another's": func(w *virtual.World, _ *Locker, key string) string { _ = w.Redis.Set(key, another); return another },
		"foreign":   func(w *virtual.World, _ *Locker, key string) string { _ = w.Redis.Set(key, "1"); return "1" },
		"wrong type": func(w *virtual.World, _ *Locker, key string) string {
			w.Redis.Del(key)
			w.Redis.HSet(key, "f", "v")
			return "hash"
		},
		"done marker": func(w *virtual.World, _ *Locker, key string) string {
			v := encodeValue(Holder{Done: true}, "its token")
			_ = w.Redis.Set(key, v)
			return v
		},
		"flushed": func(w *virtual.World, _ *Locker, key string) string {
			w.Redis.Del(key)
			_ = w.RDB.ScriptFlush(w.T.Context())
			return ""
		},
		"forced": func(w *virtual.World, l *Locker, key string) string {
			name, _ := l.Name(w.T.Context(), asynq.NewTask("work", []byte("the same each time")))
			if err := l.ForceRelease(w.T.Context(), name); err != nil {
				w.T.Error(err)
			}
			return ""
		},
	} {
		for when, after := range map[string]time.Duration{
			"at the start":  10 * time.Millisecond,
			"before a tick": ttl/3 - 10*time.Millisecond,
			"after a tick":  ttl/3 + roundTrip + 10*time.Millisecond,
		} {
			t.Run(name+"/"+when, func(t *testing.T) {
				virtual.Run(t, func(t *testing.T, w *virtual.World) {
					stopped := make(chan stop, 1)
					h := w.Host("h")
					s := lockedService(h, func(ctx context.Context) error {
						<-ctx.Done()
						stopped <- stop{at: time.Now(), cause: context.Cause(ctx)}
						return fmt.Errorf("stopped half-way: %w", asynq.SkipRetry)
					}, WithTTL(ttl), WithDoneFor(time.Hour))
					h.LockLink.Slow(roundTrip)
					info, began := s.run()
					time.Sleep(time.Until(began.Add(after)))
					h.LockLink.Slow(0) // ForceRelease is to work at once
					left, taken := tamper(w, s.locker, s.key), time.Now()
					h.LockLink.Slow(roundTrip)

					untouched := func() {
						synctest.Wait()
						value, _ := w.Redis.Get(s.key)
						if w.Redis.Type(s.key) == "hash" {
							value = "hash"
						}
						if value != left || w.Redis.TTL(s.key) != 0 {
							t.Fatalf("%s later the key holds %q with TTL %s, want %q", time.Since(taken), value, w.Redis.TTL(s.key), left)
						}
					}
					told := receive(t, ttl, "handler told", stopped)
					if took := told.at.Sub(taken); took > ttl/3+roundTrip {
						t.Errorf("told after %s, want %s at most", took, ttl/3+roundTrip)
					}
					if !errors.Is(told.cause, ErrLost) {
						t.Errorf("the cause is %v, want ErrLost", told.cause)
					}
					for range 30 {
						time.Sleep(ttl / 10)
						untouched()
					}
					if err := s.returned()[0].err; !errors.Is(err, ErrLost) || !strings.Contains(err.Error(), "stopped half-way") {
						t.Errorf("asynq sees %v, want the handler's error and ErrLost", err)
					}
					if state := w.State(info); state != "archived" {
						t.Errorf("the task is %s: SkipRetry in the handler's error got lost", state)
					}
					s.finishes(time.Second)
					s.books.want(t, "acquired=1 lost=1 ran=1")
				})
			})
		}
	}
}

// The ways in which Redis can be away.
var absences = []struct {
	name  string
	tune  []func(*redis.Options)
	begin func(*virtual.Link)
}{
	{"cut", nil, (*virtual.Link).Cut},
	{"silent", nil, (*virtual.Link).Hang},
	{"silent, calls never return", []func(*redis.Options){patient}, (*virtual.Link).Hang},
	{"loading", nil, func(l *virtual.Link) { l.Every("").Refuse("LOADING Redis is loading the dataset in memory") }},
	{"failing over", nil, func(l *virtual.Link) { l.Every("").Refuse("READONLY You can't write against a read only replica.") }},
}

func TestAHandlerIsLeftAloneWhileRedisIsAwayForLessThanTheValidity(t *testing.T) {
	const ttl = 30 * time.Second
	for _, test := range absences {
		t.Run(test.name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				h := w.Host("h", test.tune...)
				s := lockedService(h, func(ctx context.Context) error { return virtual.Busy(ctx, 3*ttl) }, WithTTL(ttl))
				_, began := s.run(asynq.MaxRetry(0))
				time.Sleep(time.Until(began.Add(ttl + time.Millisecond))) // right after an extension
				test.begin(h.LockLink)
				time.Sleep(24 * time.Second) // of 27 that the lock is still valid
				h.LockLink.Heal()
				w.Until(6*ttl, "handler's return", func() bool { return len(s.returned()) == 1 })
				if err := s.returned()[0].err; err != nil {
					t.Errorf("the handler was disturbed: %v", err)
				}
				s.finishes(time.Second)
				s.books.want(t, "acquired=1 ran=1 released=1")
			})
		})
	}
}

func TestAHandlerIsStoppedBeforeItsKeyCouldExpireWhileRedisIsAway(t *testing.T) {
	const ttl = 30 * time.Second
	for _, test := range absences {
		t.Run(test.name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				stopped := make(chan stop, 1)
				h := w.Host("h", test.tune...)
				s := lockedService(h, func(ctx context.Context) error {
					<-ctx.Done()
					k, _ := FromContext(ctx)
					stopped <- stop{time.Now(), context.Cause(ctx), w.Redis.TTL(k.Key())}
					return fmt.Errorf("stopped half-way: %w", asynq.SkipRetry)
				}, WithTTL(ttl))
				_, began := s.run()
				confirmed := began.Add(ttl) // the last extension
				time.Sleep(time.Until(confirmed.Add(time.Second)))
				test.begin(h.LockLink)
				told := receive(t, 2*ttl, "handler told", stopped)
				if took := told.at.Sub(confirmed); took != ttl-ttl/10 {
					t.Errorf("told %s after the last extension, want %s", took, ttl-ttl/10)
				}
				if told.left < ttl/10 {
					t.Errorf("told when the key had %s to live, want %s at least", told.left, ttl/10)
				}
				if !errors.Is(told.cause, ErrLost) {
					t.Errorf("the cause is %v, want ErrLost", told.cause)
				}
				time.Sleep(ttl / 2)
				h.LockLink.Heal()
				time.Sleep(ttl / 2)
				if w.Redis.Exists(s.key) {
					t.Error("the key was created again")
				}
				if err := s.returned()[0].err; !errors.Is(err, ErrLost) {
					t.Errorf("asynq sees %v, want ErrLost too", err)
				}
				s.finishes(time.Second)
				s.books.want(t, "acquired=1 lost=1 ran=1")
			})
		})
	}
}

// Handlers that do not return.

func TestADeafHandlerKeepsItsLockUntilTheGraceEnds(t *testing.T) {
	const (
		ttl     = 6 * time.Second
		timeout = 20 * time.Second
	)
	for _, grace := range []time.Duration{0, 15 * time.Second} {
		t.Run(grace.String(), func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var runs virtual.Tally
				locks, deaf := make(chan *Lock, 1), make(chan struct{})
				teachScripts(w)
				h := w.Host("h")
				s := lockedService(h, func(ctx context.Context) error {
					if runs.Count("deaf") == 0 {
						k, _ := FromContext(ctx)
						locks <- k
						defer runs.Start("deaf")()
						<-deaf
						return errors.New("too late to matter")
					}
					defer runs.Start("again")()
					return virtual.Busy(ctx, 5*time.Second)
				}, WithTTL(ttl), WithGracePeriod(grace), WithDoneFor(time.Hour))
				info, began := s.run(asynq.Timeout(timeout), asynq.MaxRetry(3))
				lock := <-locks

				abandoned := began.Add(timeout + grace)
				for time.Until(abandoned) > time.Millisecond {
					time.Sleep(min(100*time.Millisecond, time.Until(abandoned)-time.Millisecond))
					if value, _ := w.Redis.Get(s.key); value != valueOf(lock) {
						t.Fatalf("%s before the grace ends the key holds %q", time.Until(abandoned), value)
					}
				}
				if n := s.books.count(EventAbandoned); n != 0 {
					t.Errorf("abandoned %d times before the grace ended", n)
				}
				time.Sleep(2 * time.Millisecond)
				if n := s.books.count(EventAbandoned); n != 1 {
					t.Fatalf("abandoned %d times when the grace ended: %s", n, &s.books)
				}
				if e := s.books.of(EventAbandoned)[0]; e.Key != s.key || e.TaskID != info.ID || e.Held != timeout+grace || !errors.Is(e.Err, context.DeadlineExceeded) {
					t.Errorf("the event says %+v", e)
				}
				if err := lock.Check(t.Context()); !errors.Is(err, ErrLost) {
					t.Errorf("Check says %v, want ErrLost", err)
				}
				extends := len(h.LockLink.Sent(extendScript.Hash(), valueOf(lock)))

				// The key lapses, and only then the task runs again.
				w.Until(ttl, "key lapsed", func() bool { value, _ := w.Redis.Get(s.key); return value != valueOf(lock) })
				if early := abandoned.Add(ttl * 2 / 3); time.Now().Before(early) {
					t.Errorf("the key was gone %s after the grace ended; it was to lapse, not to be deleted", time.Since(abandoned))
				}
				w.Until(2*time.Minute, "the task done by a second run", func() bool { return w.State(info) == "gone" })
				if n := runs.Count("again"); n != 1 || runs.Running("deaf") != 1 {
					t.Errorf("%d later runs, %d deaf handler; want 1, 1", n, runs.Running("deaf"))
				}
				if n := len(h.LockLink.Sent(extendScript.Hash(), valueOf(lock))); n != extends {
					t.Errorf("extended %d times after it was abandoned", n-extends)
				}
				marker, _ := w.Redis.Get(s.key)
				close(deaf)
				s.finishes(time.Minute)
				time.Sleep(ttl)
				if now, _ := w.Redis.Get(s.key); now != marker || now == "" {
					t.Errorf("the deaf handler's end turned %q at the key into %q", marker, now)
				}
				if n := s.books.count(EventAbandoned); n != 1 {
					t.Errorf("abandoned %d times", n)
				}
			})
		})
	}
}

func TestAHandlerThatReturnsWithinTheGraceIsNotAbandoned(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		const ttl = 6 * time.Second
		s := lockedService(w.Host("h"), func(ctx context.Context) error {
			<-ctx.Done()
			w.Deaf(14 * time.Second)
			return context.Cause(ctx)
		}, WithTTL(ttl), WithGracePeriod(15*time.Second))
		info, _ := s.run(asynq.Timeout(10*time.Second), asynq.MaxRetry(0))
		w.Until(time.Minute, "handler's return", func() bool { return len(s.returned()) == 1 })
		time.Sleep(time.Minute) // the grace ends meanwhile
		if w.Redis.Exists(s.key) {
			t.Error("the key is still there")
		}
		if state := w.State(info); state != "archived" {
			t.Errorf("the task is %s", state)
		}
		s.finishes(time.Second)
		s.books.want(t, "acquired=1 ran=1 released=1")
	})
}

func TestALockThatIsLostDuringTheGraceIsNotAbandonedToo(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		l := locker(w.Host("h"), &b, WithTTL(3*time.Second), WithGracePeriod(time.Minute))
		ctx, cancel := context.WithCancel(t.Context())
		err := l.Do(ctx, "n", func(ctx context.Context) error {
			cancel()
			time.Sleep(10 * time.Second)
			if k, _ := FromContext(ctx); b.count(EventLost) > 0 || k.Check(t.Context()) != nil {
				t.Error("lost before anything happened")
			}
			w.Redis.Del(k1)
			time.Sleep(5 * time.Minute)
			return ctx.Err()
		})
		if !errors.Is(err, context.Canceled) || !errors.Is(err, ErrLost) {
			t.Errorf("Do returns %v, want what the function returned and ErrLost", err)
		}
		b.want(t, "acquired=1 lost=1")
	})
}

// TryAcquire.

func TestAcquireAndReleaseTakeOneRoundTripEach(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		teachScripts(w)
		h := w.Host("h")
		l := locker(h, &b)
		k := heldLock(t, l, "n")
		if err := k.Release(t.Context()); err != nil {
			t.Error(err)
		}
		again := heldLock(t, l, "n")
		if _, err := l.TryAcquire(t.Context(), "n"); !errors.Is(err, ErrHeld) { // this Locker knows
			t.Errorf("error is %v, want ErrHeld", err)
		}
		other := w.Host("other")
		if _, err := locker(other, &b).TryAcquire(t.Context(), "n"); !errors.Is(err, ErrHeld) || len(other.LockLink.Sent("")) != 1 {
			t.Errorf("error is %v after %v, want ErrHeld after one command", err, other.LockLink.Sent(""))
		}
		_ = again.Release(t.Context())
		var names []string
		for _, c := range h.LockLink.Sent("") {
			names = append(names, c.Name)
		}
		if want := []string{"SET", "EVALSHA", "SET", "EVALSHA"}; !slices.Equal(names, want) {
			t.Errorf("commands are %v, want %v", names, want)
		}
	})
}

// slowHook holds up what matches on its way to the client, as a user's own hook may.
type slowHook struct {
	matches func(redis.Cmder) bool
	d       time.Duration
}

func (slowHook) DialHook(next redis.DialHook) redis.DialHook { return next }

func (s slowHook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if s.matches(cmd) {
			time.Sleep(s.d)
		}
		return next(ctx, cmd)
	}
}

func (slowHook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func TestAClientThatHoldsUpACallIsNotWaitedForAgain(t *testing.T) {
	const (
		ttl     = 30 * time.Second
		longer  = 20 * time.Second // than anybody may wait
		release = 2 * time.Second
	)
	for _, test := range []struct {
		name    string
		matches func(redis.Cmder) bool
		call    func(t *testing.T, l *Locker, name string)
		bound   time.Duration // once it is known
	}{
		{
			"release", func(cmd redis.Cmder) bool { return slices.Contains(cmd.Args(), any(releaseScript.Hash())) },
			func(t *testing.T, l *Locker, name string) {
				if err := l.Do(t.Context(), name, func(context.Context) error { return nil }); err != nil {
					t.Errorf("Do says %v", err)
				}
			}, release,
		},
		{
			"acquire", func(cmd redis.Cmder) bool { return cmd.Name() == "set" },
			func(t *testing.T, l *Locker, name string) {
				if _, err := l.TryAcquire(t.Context(), name); !errors.Is(err, ErrUnavailable) {
					t.Errorf("TryAcquire says %v, want ErrUnavailable", err)
				}
			}, ttl / 4,
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				teachScripts(w)
				h := w.Host("h", keeping)
				h.RDB.AddHook(slowHook{test.matches, longer})
				l := locker(h, &b, WithTTL(ttl))
				if !l.prompt.Load() {
					t.Fatal("the client is not prompt from the start")
				}
				test.call(t, l, "first")
				if took := w.Elapsed(); took != longer {
					t.Errorf("the first call took %s, want %s: by the caller's goroutine", took, longer)
				}
				for i := range 3 {
					began := time.Now()
					test.call(t, l, fmt.Sprint("later ", i))
					if took := time.Since(began); took != test.bound {
						t.Errorf("a later call took %s, want %s: by another goroutine", took, test.bound)
					}
				}
				time.Sleep(longer)
				if keys := w.Redis.Keys(); len(keys) > 0 {
					t.Errorf("keys left: %v", keys)
				}
				checkIdle(t, l)
				b.balance(t, 0)
			})
		})
	}
}

func TestAClientThatIsABitSlowIsStillPrompt(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		teachScripts(w)
		h := w.Host("h", keeping)
		h.RDB.AddHook(slowHook{func(redis.Cmder) bool { return true }, time.Second})
		l := locker(h, &b)
		for range 3 {
			if err := l.Do(t.Context(), "n", func(context.Context) error { return nil }); err != nil {
				t.Error(err)
			}
		}
		if !l.prompt.Load() {
			t.Error("the client is not prompt any more")
		}
		b.want(t, "acquired=3 released=3")
	})
}

func TestATryWithAnEarlyDeadlineEndsThereThoughItsLockerIsPrompt(t *testing.T) {
	for name, fail := range map[string]func(*virtual.Link){
		"Redis hangs": (*virtual.Link).Hang,
		"Redis is slow": func(l *virtual.Link) {
			l.Slow(2 * time.Second)
		},
	} {
		t.Run(name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				const limit = time.Second
				var b books
				h := w.Host("h")
				l := locker(h, &b)
				fail(h.LockLink)
				ctx, cancel := context.WithTimeout(t.Context(), limit)
				defer cancel()
				if !l.prompt.Load() || l.isPrompt(ctx, time.Now().Add(2*limit)) {
					t.Fatal("this is not the case to be tested")
				}
				_, err := l.TryAcquire(ctx, "n")
				if took := w.Elapsed(); took != limit || !errors.Is(err, ErrUnavailable) || !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("%v after %s, want ErrUnavailable and the context's error after %s", err, took, limit)
				}
				h.LockLink.Heal()
				time.Sleep(time.Minute)
				if w.Redis.Exists(k1) {
					t.Error("the claim was not given back")
				}
				if !l.prompt.Load() {
					t.Error("the client is not prompt any more, for what the caller did not wait for")
				}
				checkIdle(t, l)
				b.balance(t, 0)
			})
		})
	}
}

func TestAPromptReleaseThatFailsGoesOnInTheBackground(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		const (
			ttl      = 30 * time.Second
			patience = 2 * time.Second
		)
		var b books
		teachScripts(w)
		h := w.Host("h", keeping)
		l := locker(h, &b, WithTTL(ttl))
		err := l.Do(t.Context(), "n", func(context.Context) error { h.LockLink.Hang(); return nil })
		if took := w.Elapsed(); err != nil || took != patience {
			t.Errorf("Do says %v after %s, want nil after %s", err, took, patience)
		}
		if !w.Redis.Exists(k1) || b.count(EventReleased) > 0 {
			t.Errorf("released before Redis was told: %s", &b)
		}
		h.LockLink.Heal()
		time.Sleep(2 * time.Second)
		if w.Redis.Exists(k1) {
			t.Error("the key was not freed")
		}
		checkIdle(t, l)
		b.want(t, "acquired=1 released=1")
	})
}

// A lock of one's own costs no round trip, but only as long as its Locker may believe in it.
func TestALockerKnowsItsOwnLockWhileThatIsValidAndNoLonger(t *testing.T) {
	const ttl = 30 * time.Second
	for name, end := range map[string]func(w *virtual.World, h *virtual.Host, k *Lock){
		"released": func(w *virtual.World, _ *virtual.Host, k *Lock) { _ = k.Release(w.T.Context()) },
		"lost": func(_ *virtual.World, h *virtual.Host, _ *Lock) {
			h.LockLink.Cut()
			time.Sleep(ttl)
			h.LockLink.Heal()
		},
		"overdue, and nobody has noticed": func(_ *virtual.World, _ *virtual.Host, k *Lock) {
			stopWatchdog(k)
			time.Sleep(ttl)
		},
		"seen to be gone": func(w *virtual.World, _ *virtual.Host, k *Lock) {
			w.Redis.Del(k.key)
			if err := k.Check(w.T.Context()); !errors.Is(err, ErrLost) {
				w.T.Errorf("Check says %v, want ErrLost", err)
			}
		},
		"freed by force": func(w *virtual.World, _ *virtual.Host, k *Lock) { _ = k.locker.ForceRelease(w.T.Context(), "n") },
		"abandoned":      func(_ *virtual.World, _ *virtual.Host, k *Lock) { k.abandon(errors.New("for a test")); time.Sleep(ttl) },
	} {
		t.Run(name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				h := w.Host("h")
				l := locker(h, &b, WithTTL(ttl))
				known := func(k *Lock) {
					t.Helper()
					h.LockLink.Forget()
					_, err := l.TryAcquire(t.Context(), "n")
					var held *HeldError
					if !errors.As(err, &held) || held.Holder != k.self || len(h.LockLink.Sent("SET")) > 0 {
						t.Errorf("error is %v after the commands %v, want the holder, and none", err, h.LockLink.Sent("SET"))
					}
				}
				k := heldLock(t, l, "n")
				known(k)
				time.Sleep(3*ttl + time.Second)
				known(k)
				end(w, h, k)
				successor := heldLock(t, l, "n")
				known(successor)
				_ = k.Release(t.Context())
				known(successor)
				_ = successor.Release(t.Context())
				l.mu.Lock()
				defer l.mu.Unlock()
				if len(l.latest) > 0 {
					t.Errorf("it still knows %d locks", len(l.latest))
				}
			})
		})
	}
}

func TestTryAcquireSaysWhoHoldsTheLock(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		first := locker(w.Host("first"), &b, WithDoneFor(time.Hour))
		second := locker(w.Host("second"), &b)
		since := time.Now()
		k := heldLock(t, first, "n")
		time.Sleep(3 * time.Second)

		host, _ := os.Hostname()
		want := HeldError{Key: k1, Holder: Holder{Host: host, PID: os.Getpid(), Since: since.UTC()}}
		for _, l := range []*Locker{first, second} {
			_, err := l.TryAcquire(t.Context(), "n")
			var held *HeldError
			if !errors.As(err, &held) || *held != want {
				t.Errorf("error is %#v, want %#v", err, want)
			}
			if !errors.Is(err, ErrHeld) || errors.Is(err, ErrDone) || errors.Is(err, ErrUnavailable) {
				t.Errorf("%v matches something else than ErrHeld", err)
			}
		}
		_ = k.Release(t.Context())

		done := time.Now()
		if err := first.Do(t.Context(), "n", func(context.Context) error { return nil }); err != nil {
			t.Error(err)
		}
		_, err := second.TryAcquire(t.Context(), "n")
		want.Holder.Done, want.Holder.Since = true, done.UTC()
		var held *HeldError
		if !errors.As(err, &held) || *held != want {
			t.Errorf("error is %#v, want %#v", err, want)
		}
		if !errors.Is(err, ErrDone) || errors.Is(err, ErrHeld) || errors.Is(err, ErrUnavailable) {
			t.Errorf("%v matches something else than ErrDone", err)
		}
	})
}

func TestTryAcquireNamesTheTaskThatHoldsTheLock(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		h := w.Host("h")
		s := lockedService(h, func(ctx context.Context) error { return virtual.Busy(ctx, 10*time.Second) })
		info, _ := s.run()
		name, _ := s.locker.Name(t.Context(), s.task)
		_, err := s.locker.TryAcquire(t.Context(), name)
		var held *HeldError
		if !errors.As(err, &held) || held.Holder.TaskID != info.ID || held.Holder.TaskType != "work" || held.Holder.Queue != "default" {
			t.Errorf("error is %v, want one that names task %s", err, info.ID)
		}
		s.finishes(time.Minute)
	})
}

func TestAFailedTryLeavesTheKeyAsItIs(t *testing.T) {
	lock := encodeValue(Holder{Host: "elsewhere", PID: 1}, "its token")
	for _, test := range []struct {
		name    string
		value   string
		matches []error
	}{
		{"another's lock", lock, []error{ErrHeld}},
		{"a lock of a later version", "redislock/2 whatever", []error{ErrHeld}},
		{"a done marker", encodeValue(Holder{Done: true}, "its token"), []error{ErrDone}},
		{"a foreign text", "1", nil},
		{"a lock without a token", valueVersion + `{"host":"h","pid":1}`, nil},
		{"a truncated lock", lock[:len(lock)-5], nil},
		{"an empty string", "", nil},
		{"a list", "", nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				if test.name == "a list" {
					_, _ = w.Redis.Push(k1, "x")
				} else {
					_ = w.Redis.Set(k1, test.value)
				}
				w.Redis.SetTTL(k1, time.Minute)
				_, err := locker(w.Host("h"), &b).TryAcquire(t.Context(), "n")
				if err == nil || !strings.Contains(err.Error(), k1) {
					t.Errorf("error is %v, want one that names the key", err)
				}
				for _, target := range []error{ErrHeld, ErrDone, ErrLost, ErrUnavailable, ErrInvalidKey, ErrClosed} {
					if got, want := errors.Is(err, target), slices.Contains(test.matches, target); got != want {
						t.Errorf("errors.Is(%v, %v) = %t, want %t", err, target, got, want)
					}
				}
				time.Sleep(time.Second)
				if test.name == "a list" {
					if values, _ := w.Redis.List(k1); !slices.Equal(values, []string{"x"}) {
						t.Errorf("the list is %q", values)
					}
				} else if value, _ := w.Redis.Get(k1); value != test.value {
					t.Errorf("the key holds %q, want %q", value, test.value)
				}
				if left := w.Redis.TTL(k1); left != time.Minute-time.Second {
					t.Errorf("the TTL is %s, want it as it was", left)
				}
				b.balance(t, 0)
			})
		})
	}
}

func TestTheContextOfTryAcquireBoundsTheTryOnly(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		type valueKey struct{}
		const ttl = 3 * time.Second
		ctx, cancel := context.WithTimeout(context.WithValue(t.Context(), valueKey{}, "kept"), time.Second)
		k, err := locker(w.Host("h"), &b, WithTTL(ttl), WithGracePeriod(0)).TryAcquire(ctx, "n")
		if err != nil {
			t.Fatal(err)
		}
		cancel()
		time.Sleep(10 * ttl)
		if err := k.Check(t.Context()); err != nil || ended(k) {
			t.Errorf("long after the end of the try's context: %v, context ended: %t", err, ended(k))
		}
		if _, ok := k.Context().Deadline(); ok || k.Context().Value(valueKey{}) != "kept" {
			t.Error("the lock's context has a deadline, or lost the values")
		}
		if err := k.Release(t.Context()); err != nil {
			t.Error(err)
		}
		b.balance(t, 0)
	})
}

func TestATryThatIsNotAnsweredInTimeEndsInTimeAndLeavesNothing(t *testing.T) {
	const ttl = 8 * time.Second // TTL/4 is less than go-redis's timeout
	for _, test := range []struct {
		name    string
		timeout time.Duration // of the caller
		fault   func(*virtual.Link)
		takes   time.Duration
		cause   error // besides ErrUnavailable
	}{
		{"silence", time.Hour, (*virtual.Link).Hang, ttl / 4, nil},
		{"slow network", time.Hour, func(l *virtual.Link) { l.Slow(ttl/4 + time.Millisecond) }, ttl / 4, nil},
		{"silence, caller has less time", time.Second, (*virtual.Link).Hang, time.Second, context.DeadlineExceeded},
		{"slow network, caller has less time", time.Second, func(l *virtual.Link) { l.Slow(time.Second + time.Millisecond) }, time.Second, context.DeadlineExceeded},
		{"caller has no time", 0, func(*virtual.Link) {}, 0, context.DeadlineExceeded},
		{"cut", time.Hour, (*virtual.Link).Cut, -1, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				h := w.Host("h")
				l := locker(h, &b, WithTTL(ttl))
				test.fault(h.LockLink)
				ctx, cancel := context.WithTimeout(t.Context(), test.timeout)
				defer cancel()
				began := time.Now()
				_, err := l.TryAcquire(ctx, "n")
				if !errors.Is(err, ErrUnavailable) || errors.Is(err, ErrHeld) || test.cause != nil && !errors.Is(err, test.cause) {
					t.Errorf("error is %v, want ErrUnavailable and %v", err, test.cause)
				}
				if took := time.Since(began); test.takes >= 0 && took != test.takes || took > ttl/4 {
					t.Errorf("took %s, want %s", took, test.takes)
				}
				time.Sleep(ttl/2 + 100*time.Millisecond)
				if w.Redis.Exists(k1) {
					t.Error("the claim was not given back")
				}
				h.LockLink.Heal()
				time.Sleep(ttl)
				if w.Redis.Exists(k1) {
					t.Error("a key is left")
				}
				if err := l.Shutdown(t.Context()); err != nil {
					t.Errorf("something is left in the Locker: %v", err)
				}
				b.balance(t, 0)
			})
		})
	}
}

// lateToSay is a context that has ended and whose Done does not say so yet.
type lateToSay struct {
	context.Context
	over *atomic.Bool
}

func (lateToSay) Done() <-chan struct{} { return nil }
func (c lateToSay) Err() error {
	if c.over.Load() {
		return context.Canceled
	}
	return nil
}

// asynq has settled a task whose context ended, and may have given it to another server.
func TestALockWhoseContextEndedDuringTheTryIsGivenBack(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		h := w.Host("h")
		l := locker(h, &b)
		for name, try := range map[string]func(context.Context, context.CancelFunc) error{
			"cancelled when Redis has set the key": func(ctx context.Context, cancel context.CancelFunc) error {
				h.LockLink.Next("SET").After(cancel)
				_, err := l.TryAcquire(ctx, "n")
				return err
			},
			"cancelled when the reply is here": func(ctx context.Context, _ context.CancelFunc) error {
				late := lateToSay{ctx, new(atomic.Bool)}
				h.LockLink.Next("SET").After(func() { late.over.Store(true) })
				return l.Do(late, "n", func(context.Context) error { t.Error("ran"); return nil })
			},
		} {
			ctx, cancel := context.WithCancel(t.Context())
			err := try(ctx, cancel)
			cancel()
			if !errors.Is(err, ErrUnavailable) || !errors.Is(err, context.Canceled) {
				t.Errorf("%s: %v, want ErrUnavailable and context.Canceled", name, err)
			}
			synctest.Wait()
			if w.Redis.Exists(k1) {
				t.Errorf("%s: the lock was not given back", name)
			}
		}
		b.balance(t, 0)
	})
}

func TestAnAcquireThatTookLessThanAQuarterOfTheTTLIsValidFromBeforeItWasSent(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		const (
			ttl = 20 * time.Second
			lag = 2900 * time.Millisecond
		)
		var b books
		h := w.Host("h")
		l := locker(h, &b, WithTTL(ttl))
		h.LockLink.Next("SET").DelayReply(lag)
		began := time.Now()
		k := heldLock(t, l, "n")
		if took := time.Since(began); took != lag {
			t.Errorf("took %s, want %s", took, lag)
		}
		h.LockLink.Hang()
		awaitEnd(k)
		if valid := time.Since(began); valid != ttl-ttl/10 {
			t.Errorf("valid for %s since the request, want %s", valid, ttl-ttl/10)
		}
		_ = k.Release(t.Context())
		b.balance(t, 0)
	})
}

func TestANameThatCannotBeUsedIsRefusedWithoutAskingRedis(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		h := w.Host("h")
		l := locker(h, &b)
		for verb, try := range map[string]func() error{
			"TryAcquire":   func() error { _, err := l.TryAcquire(t.Context(), ""); return err },
			"Do":           func() error { return l.Do(t.Context(), "", func(context.Context) error { t.Error("ran"); return nil }) },
			"Holder":       func() error { _, _, err := l.Holder(t.Context(), ""); return err },
			"ForceRelease": func() error { return l.ForceRelease(t.Context(), "") },
		} {
			if err := try(); !errors.Is(err, ErrInvalidKey) {
				t.Errorf("%s with an empty name: %v, want ErrInvalidKey", verb, err)
			}
		}
		if sent := h.LockLink.Sent(""); len(sent) > 0 {
			t.Errorf("Redis was asked: %v", sent)
		}
	})
}

func TestALockerThatWasShutDownTakesNoLocks(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		h := w.Host("h")
		l := locker(h, &b, WithFailOpen())
		if err := l.Shutdown(t.Context()); err != nil {
			t.Error(err)
		}
		if _, err := l.TryAcquire(t.Context(), "n"); !errors.Is(err, ErrClosed) {
			t.Errorf("TryAcquire: %v, want ErrClosed", err)
		}
		err := l.Do(t.Context(), "n", func(context.Context) error { t.Error("ran"); return nil })
		if !errors.Is(err, ErrClosed) {
			t.Errorf("Do: %v, want ErrClosed", err)
		}
		if sent := h.LockLink.Sent(""); len(sent) > 0 {
			t.Errorf("Redis was asked: %v", sent)
		}
		b.balance(t, 0)
	})
}

// Do.

func TestDoReturnsWhatItsFunctionDoesAndFreesTheLock(t *testing.T) {
	errWork := errors.New("the work failed")
	for _, test := range []struct {
		name   string
		fn     func(context.Context) error
		want   error
		panics any
		marker bool
	}{
		{"nil", func(context.Context) error { return nil }, nil, nil, true},
		{"error", func(context.Context) error { return errWork }, errWork, nil, false},
		{"panic", func(context.Context) error { panic(errWork) }, nil, errWork, false},
		{"released by hand", func(ctx context.Context) error { k, _ := FromContext(ctx); return k.Release(context.Background()) }, nil, nil, false},
		{"released by hand, error", func(ctx context.Context) error { k, _ := FromContext(ctx); _ = k.Release(ctx); return errWork }, errWork, nil, false},
		{"Goexit", func(context.Context) error { runtime.Goexit(); return nil }, nil, nil, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				l := locker(w.Host("h"), &b, WithDoneFor(time.Hour))
				var err error
				var panicked any
				var inner context.Context
				var wg sync.WaitGroup
				wg.Go(func() { // Goexit must not end the test
					defer func() { panicked = recover() }()
					err = l.Do(t.Context(), "n", func(ctx context.Context) error { inner = ctx; return test.fn(ctx) })
				})
				wg.Wait()
				if err != test.want || panicked != test.panics {
					t.Errorf("returned %v, panicked with %v; want %v, %v", err, panicked, test.want, test.panics)
				}
				if cause := context.Cause(inner); cause != context.Canceled {
					t.Errorf("afterwards the function's context ended by %v, want context.Canceled", cause)
				}
				h, ok, err := l.Holder(t.Context(), "n")
				if err != nil || ok != test.marker || h.Done != test.marker {
					t.Errorf("afterwards the key is held: %t by %v (%v), want a done marker: %t", ok, h, err, test.marker)
				}
				b.want(t, "acquired=1 released=1")
			})
		})
	}
}

func TestDoNeverPassesThroughALockOfItsOwn(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		l := locker(w.Host("h"), &b)
		err := l.Do(t.Context(), "n", func(ctx context.Context) error {
			if _, err := l.TryAcquire(ctx, "n"); !errors.Is(err, ErrHeld) {
				t.Errorf("TryAcquire within Do: %v, want ErrHeld", err)
			}
			return l.Do(ctx, "n", func(context.Context) error { t.Error("ran"); return nil })
		})
		if !errors.Is(err, ErrHeld) {
			t.Errorf("Do within Do: %v, want ErrHeld", err)
		}
		b.balance(t, 0)
	})
}

func TestDoKeepsTheLockForAFunctionThatOutlivesItsContext(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		const ttl = 3 * time.Second
		l := locker(w.Host("h"), &b, WithTTL(ttl))
		ctx, cancel := context.WithCancelCause(t.Context())
		stop := errors.New("stop")
		err := l.Do(ctx, "n", func(ctx context.Context) error {
			cancel(stop)
			if cause := context.Cause(ctx); cause != stop {
				t.Errorf("the context ends by %v, want its parent's cause", cause)
			}
			for range 50 {
				time.Sleep(ttl / 10)
				if _, held, _ := l.Holder(t.Context(), "n"); !held {
					t.Fatal("the lock was given up while the function runs")
				}
			}
			return nil
		})
		if err != nil {
			t.Errorf("Do returns %v", err)
		}
		if w.Redis.Exists(k1) {
			t.Error("the key is still there: it must be freed though the context has ended")
		}
		b.balance(t, 0)
	})
}

// FromContext.

func TestFromContextFindsTheInnermostLock(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		l := locker(w.Host("h"), &b)
		in := func(ctx context.Context, name string) {
			t.Helper()
			k, ok := FromContext(ctx)
			switch {
			case ok != (name != ""):
				t.Errorf("a lock found: %t", ok)
			case ok && k.Key() != "redislock:{"+name+"}":
				t.Errorf("found the lock of %s, want %s", k.Key(), name)
			case !ok && k != nil:
				t.Error("no lock, and yet not nil")
			}
		}
		in(context.Background(), "")
		err := l.Do(t.Context(), "outer", func(outer context.Context) error {
			in(outer, "outer")
			err := l.Do(outer, "inner", func(inner context.Context) error {
				in(inner, "inner")
				in(context.WithoutCancel(inner), "inner")
				return nil
			})
			in(outer, "outer")
			k, acquireErr := l.TryAcquire(outer, "third")
			if acquireErr != nil {
				return acquireErr
			}
			in(k.Context(), "third")
			in(outer, "outer")
			return errors.Join(err, k.Release(outer))
		})
		if err != nil {
			t.Error(err)
		}
		in(t.Context(), "")
		b.balance(t, 0)
	})
}

// Context.

func TestTheContextOfALockSaysHowItEnded(t *testing.T) {
	const ttl = 3 * time.Second
	for _, test := range []struct {
		name  string
		end   func(w *virtual.World, l *Locker, k *Lock)
		err   error // of the context
		cause error
		check error // of a Check afterwards
		event EventKind
	}{
		{"released", func(w *virtual.World, _ *Locker, k *Lock) { _ = k.Release(w.T.Context()) }, context.Canceled, context.Canceled, ErrLost, EventReleased},
		{"deleted", func(w *virtual.World, _ *Locker, k *Lock) { w.Redis.Del(k.Key()); time.Sleep(ttl / 3) }, context.Canceled, ErrLost, ErrLost, EventLost},
		{"out of reach", func(_ *virtual.World, l *Locker, k *Lock) { time.Sleep(ttl) }, context.Canceled, ErrLost, ErrLost, EventLost},
		{"abandoned by Shutdown", func(w *virtual.World, l *Locker, _ *Lock) {
			ctx, cancel := context.WithTimeout(w.T.Context(), time.Second)
			defer cancel()
			if err := l.Shutdown(ctx); !errors.Is(err, context.DeadlineExceeded) {
				w.T.Errorf("Shutdown returns %v, want its context's error", err)
			}
		}, context.Canceled, ErrClosed, ErrLost, EventAbandoned},
	} {
		t.Run(test.name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				h := w.Host("h")
				l := locker(h, &b, WithTTL(ttl))
				k := heldLock(t, l, "n")
				time.Sleep(time.Millisecond)
				if ended(k) || context.Cause(k.Context()) != nil {
					t.Error("a lock that is held has an ended context")
				}
				if test.name == "out of reach" {
					h.LockLink.Hang()
				}
				test.end(w, l, k)
				time.Sleep(time.Millisecond)
				if err := k.Context().Err(); err != test.err {
					t.Errorf("the context's error is %v, want %v", err, test.err)
				}
				if cause := context.Cause(k.Context()); !errors.Is(cause, test.cause) {
					t.Errorf("the cause is %v, want %v", cause, test.cause)
				}
				if released := errors.Is(context.Cause(k.Context()), ErrLost); test.event == EventReleased && released {
					t.Error("a released lock looks lost")
				}
				h.LockLink.Heal()
				if err := k.Check(t.Context()); !errors.Is(err, test.check) {
					t.Errorf("Check says %v, want %v", err, test.check)
				}
				if n := b.count(test.event); n != 1 {
					t.Errorf("%d events %s: %s", n, test.event, &b)
				}
				_ = k.Release(t.Context())
				b.balance(t, 0)
			})
		})
	}
}

func TestALockEndsOnceWhateverElseHappensToIt(t *testing.T) {
	const ttl = 3 * time.Second
	end := map[EventKind]func(w *virtual.World, l *Locker, k *Lock){
		EventReleased: func(w *virtual.World, _ *Locker, k *Lock) { _ = k.Release(w.T.Context()) },
		EventLost:     func(w *virtual.World, _ *Locker, k *Lock) { w.Redis.Del(k.Key()); _ = k.Check(w.T.Context()) },
		EventAbandoned: func(w *virtual.World, l *Locker, _ *Lock) {
			over, cancel := context.WithCancel(w.T.Context())
			cancel()
			_ = l.Shutdown(over)
		},
	}
	for first := range end {
		for then := range end {
			t.Run(fmt.Sprintf("%s, then %s", first, then), func(t *testing.T) {
				virtual.Run(t, func(t *testing.T, w *virtual.World) {
					var b books
					l := locker(w.Host("h"), &b, WithTTL(ttl))
					k := heldLock(t, l, "n")
					end[first](w, l, k)
					cause := context.Cause(k.Context())
					end[then](w, l, k)
					time.Sleep(2 * ttl)
					if now := context.Cause(k.Context()); now != cause {
						t.Errorf("the cause was %v and is now %v", cause, now)
					}
					_ = k.Release(t.Context())
					if n := b.count(first); n != 1 {
						t.Errorf("%d times %s: %s", n, first, &b)
					}
					b.balance(t, 0)
					checkDead(t, k)
					checkIdle(t, l)
				})
			})
		}
	}
}

// Check.

func TestCheckExtendsALockThatIsHeld(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		const ttl = 30 * time.Second
		var b books
		h := w.Host("h")
		k := heldLock(t, locker(h, &b, WithTTL(ttl)), "n")
		time.Sleep(9 * time.Second)
		if err := k.Check(t.Context()); err != nil {
			t.Errorf("Check says %v", err)
		}
		if left := w.Redis.TTL(k.Key()); left != ttl {
			t.Errorf("after it the TTL is %s, want %s", left, ttl)
		}
		checked := time.Now()
		h.LockLink.Hang()
		awaitEnd(k)
		if valid := time.Since(checked); valid != ttl-ttl/10 {
			t.Errorf("it made the lock valid for %s, want %s", valid, ttl-ttl/10)
		}
		h.LockLink.Heal()
		_ = k.Release(t.Context())
		b.balance(t, 0)
	})
}

func TestCheckNoticesALossAtOnce(t *testing.T) {
	for name, tamper := range map[string]func(*virtual.World, string){
		"deleted":    func(w *virtual.World, key string) { w.Redis.Del(key) },
		"another's":  func(w *virtual.World, key string) { _ = w.Redis.Set(key, encodeValue(Holder{}, "another token")) },
		"wrong type": func(w *virtual.World, key string) { w.Redis.Del(key); w.Redis.HSet(key, "f", "v") },
	} {
		t.Run(name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				k := heldLock(t, locker(w.Host("h"), &b), "n")
				tamper(w, k.Key())
				for range 2 {
					if err := k.Check(t.Context()); !errors.Is(err, ErrLost) || errors.Is(err, ErrUnavailable) {
						t.Errorf("Check says %v, want ErrLost", err)
					}
				}
				if cause := context.Cause(k.Context()); !errors.Is(cause, ErrLost) {
					t.Errorf("the context's cause is %v, want ErrLost", cause)
				}
				if w.Elapsed() > 0 {
					t.Errorf("it took %s", w.Elapsed())
				}
				if err := k.Release(t.Context()); !errors.Is(err, ErrLost) {
					t.Errorf("Release says %v, want ErrLost", err)
				}
				b.want(t, "acquired=1 lost=1")
			})
		})
	}
}

func TestCheckWaitsForAnAnswerNoLongerThanItMay(t *testing.T) {
	const ttl = 30 * time.Second
	for _, test := range []struct {
		name    string
		timeout time.Duration
		takes   time.Duration
		want    error
		lost    bool
	}{
		{"the caller's context ends", 5 * time.Second, 5 * time.Second, ErrUnavailable, false},
		{"the caller's context has ended", 0, 0, ErrUnavailable, false},
		{"the validity ends", time.Hour, ttl - ttl/10, ErrLost, true},
	} {
		for name, tune := range map[string]func(*redis.Options){
			"go-redis waits long":     func(o *redis.Options) { o.ReadTimeout = time.Minute },
			"go-redis waits for ever": patient,
		} {
			t.Run(test.name+"/"+name, func(t *testing.T) {
				virtual.Run(t, func(t *testing.T, w *virtual.World) {
					var b books
					h := w.Host("h", tune)
					k := heldLock(t, locker(h, &b, WithTTL(ttl)), "n")
					h.LockLink.Hang()
					ctx, cancel := context.WithTimeout(t.Context(), test.timeout)
					defer cancel()
					began := time.Now()
					if err := k.Check(ctx); !errors.Is(err, test.want) || errors.Is(err, ErrLost) != test.lost {
						t.Errorf("Check says %v, want %v", err, test.want)
					}
					if took := time.Since(began); took != test.takes {
						t.Errorf("it took %s, want %s", took, test.takes)
					}
					synctest.Wait()
					if ended(k) != test.lost {
						t.Errorf("the lock has ended: %t, want %t", ended(k), test.lost)
					}
					h.LockLink.Heal()
					_ = k.Release(t.Context())
					b.balance(t, 0)
				})
			})
		}
	}
}

func TestCheckWithoutAnAnswerLeavesTheLockHeld(t *testing.T) {
	for _, refusal := range []string{"LOADING Redis is loading the dataset in memory", "NOPERM this user has no permissions to run the 'evalsha' command"} {
		t.Run(strings.Fields(refusal)[0], func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				h := w.Host("h", once)
				k := heldLock(t, locker(h, &b), "n")
				f := h.LockLink.Every(extendScript.Hash()).Refuse(refusal)
				if err := k.Check(t.Context()); !errors.Is(err, ErrUnavailable) || errors.Is(err, ErrLost) || ended(k) {
					t.Errorf("Check says %v, context ended: %t; want ErrUnavailable, false", err, ended(k))
				}
				f.Lift()
				if err := k.Check(t.Context()); err != nil {
					t.Errorf("after that, Check says %v", err)
				}
				_ = k.Release(t.Context())
				b.balance(t, 0)
			})
		})
	}
}

// Release.

func TestReleaseCountsOnceHoweverOftenItIsCalled(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		teachScripts(w)
		h := w.Host("h")
		l := locker(h, &b)
		k := heldLock(t, l, "n")
		h.LockLink.Slow(100 * time.Millisecond)
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() {
				if err := k.Release(t.Context()); err != nil {
					t.Errorf("a release at the same time: %v", err)
				}
			})
		}
		wg.Wait()
		h.LockLink.Slow(0)
		successor := heldLock(t, l, "n")
		if err := k.Release(t.Context()); err != nil {
			t.Errorf("a later release: %v", err)
		}
		if n := len(h.LockLink.Sent(releaseScript.Hash())); n != 1 {
			t.Errorf("Redis was asked %d times, want once", n)
		}
		if err := successor.Check(t.Context()); err != nil {
			t.Errorf("the successor's lock: %v", err)
		}
		_ = successor.Release(t.Context())
		b.want(t, "acquired=2 released=2")
	})
}

func TestALaterReleaseReturnsWhatTheFirstDidEvenIfItsContextHasEnded(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		k := heldLock(t, locker(w.Host("h"), &b), "n")
		if err := k.Release(t.Context()); err != nil {
			t.Error(err)
		}
		over, cancel := context.WithCancel(t.Context())
		cancel()
		for range 100 { // a select between two that are ready chooses at random
			if err := k.Release(over); err != nil {
				t.Fatalf("the release is over and succeeded, but a later call says %v", err)
			}
		}
	})
}

func TestReleaseWaitsForTheReplyAsLongAsItsContextAllows(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		teachScripts(w)
		h := w.Host("h", patient)
		k := heldLock(t, locker(h, &b), "n")
		const lag = 4 * time.Second
		h.LockLink.Next(releaseScript.Hash()).Delay(lag)
		began := time.Now()
		for _, wait := range []time.Duration{0, time.Second} {
			ctx, cancel := context.WithTimeout(t.Context(), wait)
			err := k.Release(ctx)
			cancel()
			if !errors.Is(err, ErrUnavailable) || !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, ErrLost) {
				t.Errorf("Release says %v, want ErrUnavailable and the context's error", err)
			}
			if took := time.Since(began); took != wait {
				t.Errorf("it took %s, want %s", took, wait)
			}
			if cause := context.Cause(k.Context()); cause != context.Canceled {
				t.Errorf("the lock's context ended by %v, want context.Canceled at once", cause)
			}
			if err := k.Check(t.Context()); !errors.Is(err, ErrLost) {
				t.Errorf("Check says %v while the release is under way, want ErrLost", err)
			}
		}
		if n := b.count(EventReleased); n != 0 || !w.Redis.Exists(k.Key()) {
			t.Errorf("told as released %d times before Redis was told", n)
		}
		if err := k.Release(t.Context()); err != nil {
			t.Errorf("the reply says %v", err)
		}
		if took := time.Since(began); took != lag || w.Redis.Exists(k.Key()) {
			t.Errorf("freed after %s: %t, want %s", took, !w.Redis.Exists(k.Key()), lag)
		}
		b.want(t, "acquired=1 released=1")
	})
}

func TestReleaseSaysWhatRedisSays(t *testing.T) {
	const ttl = 5 * time.Second
	foreign := encodeValue(Holder{Host: "elsewhere"}, "another token")
	for _, test := range []struct {
		name    string
		prepare func(w *virtual.World, h *virtual.Host, k *Lock)
		matches []error
		text    string
		event   EventKind
	}{
		{"ours", func(*virtual.World, *virtual.Host, *Lock) {}, nil, "", EventReleased},
		{"gone while valid", func(w *virtual.World, _ *virtual.Host, k *Lock) { w.Redis.Del(k.Key()) }, nil, "", EventReleased},
		{"another's", func(w *virtual.World, _ *virtual.Host, k *Lock) { _ = w.Redis.Set(k.Key(), foreign) }, []error{ErrLost}, k1, EventLost},
		{"wrong type", func(w *virtual.World, _ *virtual.Host, k *Lock) {
			w.Redis.Del(k.Key())
			w.Redis.HSet(k.Key(), "f", "v")
		}, []error{ErrLost}, k1, EventLost},
		{"out of reach", func(_ *virtual.World, h *virtual.Host, _ *Lock) { h.LockLink.Cut() }, []error{ErrUnavailable}, k1, EventReleased},
		{"forbidden", func(_ *virtual.World, h *virtual.Host, _ *Lock) { h.LockLink.Every("").Refuse("NOPERM no permission") }, nil, "NOPERM no permission", EventReleased},
		{"lost before", func(_ *virtual.World, h *virtual.Host, _ *Lock) { h.LockLink.Cut(); time.Sleep(ttl); h.LockLink.Heal() }, []error{ErrLost}, k1, EventLost},
	} {
		t.Run(test.name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				h := w.Host("h")
				k := heldLock(t, locker(h, &b, WithTTL(ttl)), "n")
				test.prepare(w, h, k)
				first := k.Release(t.Context())
				for _, target := range []error{ErrHeld, ErrLost, ErrUnavailable, ErrClosed} {
					if got, want := errors.Is(first, target), slices.Contains(test.matches, target); got != want {
						t.Errorf("errors.Is(%v, %v) = %t, want %t", first, target, got, want)
					}
				}
				if (first == nil) != (test.text == "") || first != nil && !strings.Contains(first.Error(), test.text) {
					t.Errorf("Release says %v, want something with %q", first, test.text)
				}
				if again := k.Release(t.Context()); !errors.Is(again, first) {
					t.Errorf("the second time it says %v, want the same", again)
				}
				if e := b.of(EventReleased, EventLost); len(e) != 1 || e[0].Kind != test.event {
					t.Errorf("the books say %s, want one %s", &b, test.event)
				} else if (e[0].Err == nil) != (first == nil) {
					t.Errorf("the event's error is %v, the release's %v", e[0].Err, first)
				}
				switch value, _ := w.Redis.Get(k.Key()); {
				case test.name == "another's" && value != foreign:
					t.Errorf("the key holds %q, want what it did", value)
				case test.name == "wrong type" && w.Redis.HGet(k.Key(), "f") != "v":
					t.Error("the hash is gone")
				}
			})
		})
	}
}

// A handler has no other context at hand than the one that Release ends.
func TestAHandlerCanReleaseWithItsOwnContext(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		const roundTrip = 100 * time.Millisecond
		h := w.Host("h")
		err := locker(h, &b).Do(t.Context(), "n", func(ctx context.Context) error {
			k, _ := FromContext(ctx)
			h.LockLink.Slow(roundTrip)
			if err := k.Release(ctx); err != nil {
				t.Errorf("Redis would have answered in %s, but Release says: %v", roundTrip, err)
			}
			if w.Redis.Exists(k.Key()) {
				t.Error("Release came back before the key was free")
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
		b.balance(t, 0)
	})
}

func TestReleaseByHandEndsTheHandlersContextAndLeavesNoMarker(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var cause error
		s := lockedService(w.Host("h"), func(ctx context.Context) error {
			k, _ := FromContext(ctx)
			if err := k.Release(context.WithoutCancel(ctx)); err != nil {
				t.Error(err)
			}
			cause = context.Cause(ctx)
			return nil
		}, WithDoneFor(time.Hour))
		info, _ := s.run()
		w.Until(10*time.Second, "task gone", func() bool { return w.State(info) == "gone" })
		s.finishes(time.Second)
		if cause != context.Canceled {
			t.Errorf("the handler's context ended by %v, want context.Canceled", cause)
		}
		if w.Redis.Exists(s.key) {
			t.Error("a marker was written")
		}
	})
}

// Holder and ForceRelease.

func TestHolderSaysWhoHoldsTheLock(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		h := w.Host("h")
		l := locker(h, &b, WithDoneFor(time.Minute))
		see := func(when string, wantOK, wantDone bool) Holder {
			t.Helper()
			got, ok, err := l.Holder(t.Context(), "n")
			if err != nil || ok != wantOK || got.Done != wantDone || !ok && got != (Holder{}) {
				t.Errorf("%s: %+v, %t, %v; want ok=%t, done=%t", when, got, ok, err, wantOK, wantDone)
			}
			return got
		}
		see("free", false, false)
		since := time.Now()
		err := l.Do(t.Context(), "n", func(context.Context) error {
			time.Sleep(time.Second)
			if got := see("held", true, false); !got.Since.Equal(since) || got.PID != os.Getpid() {
				t.Errorf("held by %v", got)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
		if got := see("done", true, true); !got.Since.Equal(since.Add(time.Second)) {
			t.Errorf("done by %v", got)
		}
		time.Sleep(time.Minute + time.Millisecond)
		see("marker lapsed", false, false)

		for what, put := range map[string]func(){
			"foreign text":    func() { _ = w.Redis.Set(k1, "secret") },
			"another version": func() { _ = w.Redis.Set(k1, "redislock/2 secret") },
			"wrong type":      func() { w.Redis.Del(k1); w.Redis.HSet(k1, "f", "secret") },
		} {
			put()
			got, ok, err := l.Holder(t.Context(), "n")
			if err == nil || ok || got != (Holder{}) || !strings.Contains(err.Error(), k1) || strings.Contains(err.Error(), "secret") || errors.Is(err, ErrUnavailable) {
				t.Errorf("%s: %+v, %t, %v; want an error that names the key", what, got, ok, err)
			}
		}
		h.LockLink.Cut()
		if _, ok, err := l.Holder(t.Context(), "n"); !errors.Is(err, ErrUnavailable) || ok {
			t.Errorf("out of reach: %t, %v; want ErrUnavailable", ok, err)
		}
		b.balance(t, 0)
	})
}

func TestForceReleaseFreesALockOrAMarker(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		const ttl = 6 * time.Second
		var b books
		holder, operator := w.Host("holder"), w.Host("operator")
		l := locker(holder, &b, WithTTL(ttl), WithDoneFor(time.Hour))
		o := locker(operator, &b)
		if err := o.ForceRelease(t.Context(), "n"); err != nil {
			t.Errorf("of a free lock: %v", err)
		}
		k := heldLock(t, l, "n")
		time.Sleep(time.Second)
		forced := time.Now()
		if err := o.ForceRelease(t.Context(), "n"); err != nil {
			t.Errorf("of a held lock: %v", err)
		}
		successor := heldLock(t, o, "n")
		awaitEnd(k)
		if took := time.Since(forced); took > ttl/3 || !errors.Is(context.Cause(k.Context()), ErrLost) {
			t.Errorf("the holder's context ended after %s by %v, want ErrLost within %s", took, context.Cause(k.Context()), ttl/3)
		}
		if err := k.Release(t.Context()); !errors.Is(err, ErrLost) {
			t.Errorf("the holder's release says %v, want ErrLost", err)
		}
		if err := successor.Check(t.Context()); err != nil {
			t.Errorf("the successor's lock: %v", err)
		}
		if err := successor.Release(t.Context()); err != nil {
			t.Error(err)
		}

		if err := l.Do(t.Context(), "n", func(context.Context) error { return nil }); err != nil {
			t.Error(err)
		}
		if err := o.ForceRelease(t.Context(), "n"); err != nil {
			t.Errorf("of a done marker: %v", err)
		}
		if w.Redis.Exists(k1) {
			t.Error("the marker is still there")
		}
		operator.LockLink.Cut()
		if err := o.ForceRelease(t.Context(), "n"); !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), k1) {
			t.Errorf("out of reach: %v, want ErrUnavailable and the key", err)
		}
		b.balance(t, 0)
	})
}

// As that of a tunnel may.
func TestADialerThatGivesUpWithItsContextOnlyHoldsUpNoReturn(t *testing.T) {
	const ttl = 30 * time.Second
	for name, tune := range map[string]func(*redis.Options){"keeping deadlines": keeping, "as it is": func(*redis.Options) {}} {
		t.Run(name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				var blocked atomic.Bool
				teachScripts(w)
				h := w.Host("h", tune, func(o *redis.Options) {
					dial := o.Dialer
					o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
						if blocked.Load() {
							<-ctx.Done()
							return nil, ctx.Err()
						}
						return dial(ctx, network, addr)
					}
				})
				l := locker(h, &b, WithTTL(ttl))
				var returned time.Time
				err := l.Do(t.Context(), "n", func(context.Context) error {
					blocked.Store(true)
					h.LockLink.Cut() // what is open
					h.LockLink.Heal()
					returned = time.Now()
					return nil
				})
				if late := time.Since(returned); err != nil || late > 2*time.Second {
					t.Errorf("the return took %s (%v), want 2 s at most", late, err)
				}
				began := time.Now()
				if _, err := l.TryAcquire(t.Context(), "other"); !errors.Is(err, ErrUnavailable) || time.Since(began) > ttl/4 {
					t.Errorf("the try took %s (%v), want ErrUnavailable after %s at most", time.Since(began), err, ttl/4)
				}
				blocked.Store(false)
				time.Sleep(ttl)
				checkIdle(t, l)
				b.want(t, "acquired=1 released=1")
			})
		})
	}
}

func TestAPanicOfAClientsHookLeaksNothing(t *testing.T) {
	for _, command := range []string{"set", "evalsha"} {
		t.Run(command, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				teachScripts(w)
				h := w.Host("h", keeping)
				h.RDB.AddHook(panicOnce{command, new(atomic.Bool)})
				l := locker(h, &b, WithTTL(30*time.Second))
				func() {
					defer func() {
						if recover() == nil {
							t.Error("the panic got lost")
						}
					}()
					_ = l.Do(t.Context(), "n", func(context.Context) error { return nil })
				}()
				time.Sleep(time.Second)
				checkIdle(t, l)
				b.balance(t, 0)
			})
		})
	}
}

// panicOnce is a hook that panics at the first command of a name.
type panicOnce struct {
	command string
	did     *atomic.Bool
}

func (p panicOnce) DialHook(next redis.DialHook) redis.DialHook { return next }
func (p panicOnce) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}
func (p panicOnce) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() == p.command && p.did.CompareAndSwap(false, true) {
			panic("a hook")
		}
		return next(ctx, cmd)
	}
}

func TestAnObserverOfALossHoldsUpNoReturn(t *testing.T) {
	for name, tune := range map[string]func(*redis.Options){"keeping deadlines": keeping, "as it is": func(*redis.Options) {}} {
		t.Run(name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				const slow = time.Minute
				h := w.Host("h", tune)
				var b books
				l := locker(h, &b, WithTTL(30*time.Second), WithObserver(func(_ context.Context, e Event) {
					if e.Kind == EventLost {
						time.Sleep(slow)
					}
				}))
				var returned time.Time
				err := l.Do(t.Context(), "n", func(ctx context.Context) error {
					w.Redis.Del(k1)
					<-ctx.Done()
					returned = time.Now()
					return ctx.Err()
				})
				if late := time.Since(returned); !errors.Is(err, ErrLost) || late > 2*time.Second {
					t.Errorf("the return took %s (%v), want 2 s at most, and ErrLost", late, err)
				}
				time.Sleep(slow)
				checkIdle(t, l)
				b.want(t, "acquired=1 lost=1")
			})
		})
	}
}

func TestABellRingsByItsDeadlineAndNeedsFewTimers(t *testing.T) {
	for _, distance := range []time.Duration{time.Second, time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			var b bell
			peals := make(map[<-chan struct{}]bool)
			for range 1000 {
				deadline := time.Now().Add(distance)
				rung := b.at(deadline)
				peals[rung] = true
				select {
				case <-rung:
					t.Fatal("it has rung before the call")
				default:
				}
				time.Sleep(distance / 1000)
			}
			if len(peals) > 12 {
				t.Errorf("%d timers in %v, want 12 at most", len(peals), distance)
			}
			asked := time.Now()
			<-b.at(asked.Add(distance))
			if took := time.Since(asked); took > distance || took < distance-distance/10 {
				t.Errorf("it rings after %v, want %v or up to a tenth less", took, distance)
			}
		})
	}
}

func TestABellOfAnotherClockIsNotBelieved(t *testing.T) {
	var b bell
	b.at(time.Now().Add(time.Millisecond))
	synctest.Test(t, func(t *testing.T) { // whose clock starts in the year 2000
		began := time.Now()
		if <-b.at(began.Add(time.Second)); time.Since(began) != time.Second {
			t.Errorf("it rings after %v, want 1s", time.Since(began))
		}
	})
}

package redislock

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"example.com/redislock/internal/virtual"
	"github.com/redis/go-redis/v9"
)

// extendTimes returns when the lock's extensions were sent, since its SET was.
func extendTimes(h *virtual.Host, k *Lock) []time.Duration {
	began := h.LockLink.Sent("SET", valueOf(k))[0].At
	var times []time.Duration
	for _, c := range h.LockLink.Sent(extendScript.Hash(), valueOf(k)) {
		times = append(times, c.At.Sub(began))
	}
	return times
}

// checkDead fails the test if anything of the lock's watchdog is left.
func checkDead(t *testing.T, k *Lock) {
	t.Helper()
	k.mu.Lock()
	defer k.mu.Unlock()
	k.locker.alarms.mu.Lock()
	defer k.locker.alarms.mu.Unlock()
	if k.watchdog.alarm.place > 0 {
		t.Errorf("%s: its alarm is still set", k.key)
	}
	if timer := k.locker.alarms.timer; len(k.locker.alarms.locks) == 0 && timer != nil && timer.Stop() {
		t.Errorf("%s: the timer still runs, for no lock", k.key)
	}
	if g := k.watchdog.grace; g != nil && g.Stop() {
		t.Errorf("%s: the grace timer still runs", k.key)
	}
	if k.watchdog.unwatch != nil && k.watchdog.unwatch() {
		t.Errorf("%s: the work's context is still watched", k.key)
	}
}

// ourGoroutines returns the stacks of the goroutines that are in a Lock's or Locker's code.
func ourGoroutines() []string {
	synctest.Wait()
	buf := make([]byte, 1<<20)
	for runtime.Stack(buf, true) == len(buf) {
		buf = make([]byte, 2*len(buf))
	}
	all := strings.Split(string(buf[:runtime.Stack(buf, true)]), "\n\n")
	return slices.DeleteFunc(all, func(stack string) bool {
		return !strings.Contains(stack, "redislock.(*Lock).") && !strings.Contains(stack, "redislock.(*Locker).")
	})
}

// checkIdle fails the test if the Locker owns anything.
func checkIdle(t *testing.T, l *Locker) {
	t.Helper()
	if left := ourGoroutines(); len(left) > 0 {
		t.Errorf("%d goroutines are left:\n%s", len(left), strings.Join(left, "\n\n"))
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.busy != 0 || len(l.locks) != 0 || len(l.latest) != 0 || len(l.waits) != 0 || l.alarms.len() != 0 {
		t.Errorf("left in the Locker: busy=%d, %d locks, %d of them known by key, %d waiting rooms, %d alarms",
			l.busy, len(l.locks), len(l.latest), len(l.waits), l.alarms.len())
	}
}

func TestALockIsExtendedEveryThirdOfItsTTL(t *testing.T) {
	for _, ttl := range []time.Duration{time.Second, 7 * time.Second, 30 * time.Second} {
		for _, roundTrip := range []time.Duration{0, 200 * time.Millisecond} {
			t.Run(fmt.Sprintf("%s, round trip %s", ttl, roundTrip), func(t *testing.T) {
				virtual.Run(t, func(t *testing.T, w *virtual.World) {
					var b books
					teachScripts(w)
					h := w.Host("h")
					h.LockLink.Slow(roundTrip)
					k := heldLock(t, locker(h, &b, WithTTL(ttl)), "n")
					var want []time.Duration
					for i := range 10 {
						want = append(want, time.Duration(i+1)*(ttl/3))
					}
					time.Sleep(10*(ttl/3) + roundTrip - w.Elapsed() + time.Millisecond)
					if got := extendTimes(h, k); !slices.Equal(got, want) {
						t.Errorf("extended after %v, want %v", got, want)
					}
					if left := w.Redis.TTL(k.Key()); left != ttl-time.Millisecond {
						t.Errorf("the key's TTL is %s, want %s: a millisecond less than all of it", left, ttl-time.Millisecond)
					}
					if err := k.Release(t.Context()); err != nil {
						t.Error(err)
					}
					checkDead(t, k)
					b.balance(t, 0)
				})
			})
		}
	}
}

func TestAFailedExtendIsTriedAgainSoon(t *testing.T) {
	failures := map[string]func(*virtual.Fault) *virtual.Fault{
		"connection breaks": (*virtual.Fault).LoseRequest,
		"LOADING": func(f *virtual.Fault) *virtual.Fault {
			return f.Refuse("LOADING Redis is loading the dataset in memory")
		},
		"NOPERM": func(f *virtual.Fault) *virtual.Fault {
			return f.Refuse("NOPERM this user has no permissions to run the 'evalsha' command")
		},
		"an unknown error": func(f *virtual.Fault) *virtual.Fault { return f.Refuse("ERR something nobody has thought of") },
	}
	for ttl, pause := range map[time.Duration]time.Duration{
		time.Second:             50 * time.Millisecond,
		1500 * time.Millisecond: 50 * time.Millisecond,
		3 * time.Second:         100 * time.Millisecond,
		30 * time.Second:        time.Second,
	} {
		for name, fail := range failures {
			t.Run(fmt.Sprintf("%s/%s", ttl, name), func(t *testing.T) {
				virtual.Run(t, func(t *testing.T, w *virtual.World) {
					var b books
					teachScripts(w)
					h := w.Host("h", once)
					l := locker(h, &b, WithTTL(ttl))

					// Four failures, and then all is well again.
					k := heldLock(t, l, "passing")
					first := fail(h.LockLink.Every(extendScript.Hash(), k.Key()))
					time.Sleep(ttl/3 + 4*pause - pause/2)
					first.Lift()
					time.Sleep(ttl + pause)
					var want []time.Duration
					for i := range 5 {
						want = append(want, ttl/3+time.Duration(i)*pause)
					}
					for range 2 {
						want = append(want, want[len(want)-1]+ttl/3)
					}
					if got := extendTimes(h, k); len(got) < len(want) || !slices.Equal(got[:len(want)], want) {
						t.Errorf("tried after %v, want %v, …", got, want)
					}
					if ended(k) {
						t.Errorf("lost by passing trouble: %v", context.Cause(k.Context()))
					}
					_ = k.Release(t.Context())

					// Failures until the validity ends.
					k = heldLock(t, l, "lasting")
					fail(h.LockLink.Every(extendScript.Hash(), k.Key()))
					want = nil
					for at := ttl / 3; at < ttl-ttl/10; at += pause {
						want = append(want, at)
					}
					time.Sleep(5 * ttl)
					if got := extendTimes(h, k); !slices.Equal(got, want) {
						t.Errorf("tried after %v, want %v", got, want)
					}
					if e := b.of(EventLost); len(e) != 1 || e[0].Held != ttl-ttl/10 || !errors.Is(e[0].Err, ErrLost) {
						t.Errorf("%d losses told (%+v), want one after %s", len(e), e, ttl-ttl/10)
					}
					checkDead(t, k)
					h.LockLink.Heal()
					_ = k.Release(t.Context())
					b.balance(t, 0)
				})
			})
		}
	}
}

func TestAReplyThatTheKeyIsNotOursIsALossAtTheNextTick(t *testing.T) {
	const ttl = 30 * time.Second
	for name, tamper := range map[string]func(w *virtual.World, key string){
		"deleted":    func(w *virtual.World, key string) { w.Redis.Del(key) },
		"another's":  func(w *virtual.World, key string) { _ = w.Redis.Set(key, encodeValue(Holder{}, "another token")) },
		"wrong type": func(w *virtual.World, key string) { w.Redis.Del(key); _, _ = w.Redis.Push(key, "x") },
		"done marker": func(w *virtual.World, key string) {
			_ = w.Redis.Set(key, encodeValue(Holder{Done: true}, "another token"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				teachScripts(w)
				h := w.Host("h")
				l := locker(h, &b, WithTTL(ttl))
				k := heldLock(t, l, "n")
				time.Sleep(ttl/3 + time.Millisecond)
				tamper(w, k.Key())
				before := w.Redis.Dump()
				awaitEnd(k)
				if at := w.Elapsed(); at != 2*ttl/3 {
					t.Errorf("the context ended after %s, want %s", at, 2*ttl/3)
				}
				if cause := context.Cause(k.Context()); !errors.Is(cause, ErrLost) || errors.Is(cause, ErrUnavailable) {
					t.Errorf("the cause is %v, want ErrLost", cause)
				}
				checkDead(t, k)
				time.Sleep(3 * ttl)
				if n := len(extendTimes(h, k)); n != 2 {
					t.Errorf("%d extensions, want none after the loss", n-2)
				}
				if now := w.Redis.Dump(); now != before {
					t.Errorf("Redis holds\n%s\nwant\n%s", now, before)
				}
				if err := k.Release(t.Context()); !errors.Is(err, ErrLost) {
					t.Errorf("Release says %v, want ErrLost", err)
				}
				checkIdle(t, l)
				b.want(t, "acquired=1 lost=1")
			})
		})
	}
}

func TestSilenceIsALossBeforeTheKeyCanExpire(t *testing.T) {
	const ttl = 30 * time.Second
	silences := slices.Clone(absences)
	for _, refusal := range []string{"NOPERM no permission", "NOAUTH Authentication required.", "ERR max number of clients reached", "MISCONF stop-writes"} {
		silences = append(silences, struct {
			name  string
			tune  []func(*redis.Options)
			begin func(*virtual.Link)
		}{refusal, nil, func(l *virtual.Link) { l.Every("").Refuse(refusal) }})
	}
	for _, test := range silences {
		for name, confirmed := range map[string]time.Duration{"never extended": 0, "extended before": 2 * ttl / 3} {
			t.Run(test.name+"/"+name, func(t *testing.T) {
				virtual.Run(t, func(t *testing.T, w *virtual.World) {
					var b books
					h := w.Host("h", test.tune...)
					l := locker(h, &b, WithTTL(ttl))
					k := heldLock(t, l, "n")
					time.Sleep(confirmed + time.Millisecond)
					test.begin(h.LockLink)
					awaitEnd(k)
					if at := w.Elapsed() - confirmed; at != ttl-ttl/10 {
						t.Errorf("the context ended %s after the last confirmation, want %s", at, ttl-ttl/10)
					}
					if left := w.Redis.TTL(k.Key()); left != ttl/10 {
						t.Errorf("the key's TTL was %s then, want %s", left, ttl/10)
					}
					if cause := context.Cause(k.Context()); !errors.Is(cause, ErrLost) {
						t.Errorf("the cause is %v, want ErrLost", cause)
					}
					checkDead(t, k)
					h.LockLink.Heal()
					time.Sleep(3 * ttl)
					if w.Redis.Exists(k.Key()) || !ended(k) {
						t.Error("a lost lock came back")
					}
					_ = k.Release(t.Context())
					checkIdle(t, l)
					b.want(t, "acquired=1 lost=1")
				})
			})
		}
	}
}

// How long Redis and the network took over a call does not lengthen the validity.
func TestAConfirmationCountsFromWhenItsRequestWasSent(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		const ttl = 30 * time.Second
		var b books
		teachScripts(w)
		h := w.Host("h", patient)
		k := heldLock(t, locker(h, &b, WithTTL(ttl)), "n")
		h.LockLink.Next(extendScript.Hash()).DelayReply(ttl / 2) // sent at TTL/3, known at TTL*5/6
		h.LockLink.Every(extendScript.Hash()).SwallowRequest()
		awaitEnd(k)
		if want := ttl/3 + ttl - ttl/10; w.Elapsed() != want {
			t.Errorf("valid for %s, want %s", w.Elapsed(), want)
		}
		h.LockLink.Heal()
		_ = k.Release(t.Context())
		b.balance(t, 0)
	})
}

func TestAnOldConfirmationThatComesLateDoesNotShortenTheValidity(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		const ttl = 30 * time.Second
		var b books
		teachScripts(w)
		h := w.Host("h", patient)
		k := heldLock(t, locker(h, &b, WithTTL(ttl)), "n")
		h.LockLink.Next(extendScript.Hash()).DelayReply(ttl / 2)          // sent at TTL/3, known at TTL*5/6
		h.LockLink.Next(extendScript.Hash()).DelayReply(time.Millisecond) // sent at TTL*2/3, known at once
		h.LockLink.Every(extendScript.Hash()).SwallowRequest()
		awaitEnd(k)
		if want := 2*ttl/3 + ttl - ttl/10; w.Elapsed() != want {
			t.Errorf("valid for %s, want %s", w.Elapsed(), want)
		}
		h.LockLink.Heal()
		_ = k.Release(t.Context())
		b.balance(t, 0)
	})
}

func TestAConfirmationAfterTheLossDoesNotReviveTheLock(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		const ttl = 30 * time.Second
		var b books
		teachScripts(w)
		h := w.Host("h", patient)
		l := locker(h, &b, WithTTL(ttl))
		k := heldLock(t, l, "n")
		late := h.LockLink.Every(extendScript.Hash()).DelayReply(ttl) // Redis extends, nobody knows
		awaitEnd(k)
		if want := ttl - ttl/10; w.Elapsed() != want {
			t.Errorf("valid for %s, want %s", w.Elapsed(), want)
		}
		time.Sleep(2 * ttl)
		if n := late.Hits(); n != 2 {
			t.Errorf("extended %d times, want at TTL/3 and TTL*2/3 only", n)
		}
		if err := k.Check(t.Context()); !errors.Is(err, ErrLost) || !ended(k) {
			t.Errorf("Check says %v, want ErrLost", err)
		}
		checkDead(t, k)
		_ = k.Release(t.Context())
		checkIdle(t, l)
		b.want(t, "acquired=1 lost=1")
	})
}

func TestACallThatNeverReturnsKeepsTheNextFromNothing(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		const ttl = 30 * time.Second
		var b books
		teachScripts(w)
		h := w.Host("h", patient)
		k := heldLock(t, locker(h, &b, WithTTL(ttl)), "n")
		h.LockLink.Next(extendScript.Hash()).SwallowRequest()
		time.Sleep(5*ttl + time.Millisecond)
		if ended(k) {
			t.Fatalf("one lost call cost the lock: %v", context.Cause(k.Context()))
		}
		var want []time.Duration
		for i := range 15 {
			want = append(want, time.Duration(i+1)*ttl/3)
		}
		if got := extendTimes(h, k); !slices.Equal(got, want) {
			t.Errorf("extended after %v, want %v", got, want)
		}
		if err := k.Release(t.Context()); err != nil {
			t.Error(err)
		}
		b.balance(t, 0)
	})
}

func TestCallsThatNeverReturnDelayNeitherTheirDeadlineNorAnotherLock(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		const ttl = 30 * time.Second
		var b books
		teachScripts(w)
		h := w.Host("h", patient)
		l := locker(h, &b, WithTTL(ttl))
		stuck, other := heldLock(t, l, "stuck"), heldLock(t, l, "other")
		h.LockLink.Every("", stuck.Key()).SwallowRequest()

		awaitEnd(stuck)
		if at := w.Elapsed(); at != ttl-ttl/10 || !errors.Is(context.Cause(stuck.Context()), ErrLost) {
			t.Errorf("the context ended after %s by %v, want ErrLost after %s", at, context.Cause(stuck.Context()), ttl-ttl/10)
		}
		checkDead(t, stuck)
		if n := len(ourGoroutines()); n > 2 {
			t.Errorf("%d goroutines for two calls that hang", n)
		}
		// Not even the release of the stuck lock keeps anybody from anything.
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := stuck.Release(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Release says %v, want the context's error", err)
		}
		began := time.Now()
		third := heldLock(t, l, "third")
		if err := errors.Join(third.Check(t.Context()), third.Release(t.Context())); err != nil || time.Since(began) > 0 {
			t.Errorf("a third lock took %s (%v)", time.Since(began), err)
		}

		time.Sleep(5*ttl + time.Millisecond - w.Elapsed())
		var want []time.Duration
		for i := range 15 {
			want = append(want, time.Duration(i+1)*ttl/3)
		}
		if got := extendTimes(h, other); !slices.Equal(got, want) || ended(other) {
			t.Errorf("the other lock was extended after %v, want %v; it has ended: %t", got, want, ended(other))
		}
		if err := other.Release(t.Context()); err != nil {
			t.Error(err)
		}
		h.LockLink.Heal() // now the calls return
		<-stuck.done()
		checkIdle(t, l)
		b.balance(t, 0)
	})
}

func TestAnExtendThatIsUnderWayDelaysNoReturnAndRevivesNothing(t *testing.T) {
	for _, doneFor := range []time.Duration{0, time.Hour} {
		t.Run(fmt.Sprintf("done for %s", doneFor), func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				const ttl = 30 * time.Second
				var b books
				teachScripts(w)
				h := w.Host("h", patient)
				l := locker(h, &b, WithTTL(ttl), WithDoneFor(doneFor))
				late := h.LockLink.Next(extendScript.Hash()).Delay(ttl)
				err := l.Do(t.Context(), "n", func(context.Context) error {
					time.Sleep(ttl/3 + time.Second)
					return nil
				})
				if took := w.Elapsed(); err != nil || took != ttl/3+time.Second {
					t.Errorf("Do returned %v after %s, want nil when its function did", err, took)
				}
				before := w.Redis.Dump()
				time.Sleep(2 * ttl)
				if late.Hits() != 1 || w.Redis.Dump() != before {
					t.Errorf("%d late extends turned\n%s\ninto\n%s", late.Hits(), before, w.Redis.Dump())
				}
				if left := w.Redis.TTL(k1); doneFor > 0 && left != doneFor-2*ttl {
					t.Errorf("the marker's TTL is %s, want %s", left, doneFor-2*ttl)
				}
				checkIdle(t, l)
				b.want(t, "acquired=1 released=1")
			})
		})
	}
}

func TestThousandsOfHeldLocksCostNoGoroutine(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		const (
			n   = 2000
			ttl = 30 * time.Second
		)
		w.Redis.ClockTTL(false) // miniredis looks at every key for it, at every command
		teachScripts(w)
		h := w.Host("h")
		var lost, abandoned atomic.Int64
		l, err := New(h.RDB, WithTTL(ttl), WithLogger(slog.New(slog.DiscardHandler)), WithObserver(func(_ context.Context, e Event) {
			switch e.Kind {
			case EventLost:
				lost.Add(1)
			case EventAbandoned:
				abandoned.Add(1)
			}
		}))
		if err != nil {
			t.Fatal(err)
		}
		_ = h.RDB.Ping(t.Context()) // so that its connection is there
		synctest.Wait()
		before := runtime.NumGoroutine()

		locks := make([]*Lock, n)
		for i := range locks {
			locks[i] = heldLock(t, l, fmt.Sprint(i))
			time.Sleep(time.Millisecond)
		}
		lean := func(when string) {
			t.Helper()
			if ours := ourGoroutines(); len(ours) > 0 {
				t.Errorf("%s, %d locks have %d goroutines; the first:\n%s", when, n, len(ours), ours[0])
			}
			if more := runtime.NumGoroutine() - before; more > 100 {
				t.Errorf("%s, there are %d more goroutines for %d locks", when, more, n)
			}
		}
		lean("after they were acquired")
		time.Sleep(ttl/3 + 500*time.Microsecond)
		lean("after their first extension")
		extended := map[string]bool{}
		for _, c := range h.LockLink.Sent(extendScript.Hash()) {
			extended[c.Args[2]] = true
		}
		if len(extended) != n || lost.Load() > 0 {
			t.Errorf("%d of %d extended, %d lost", len(extended), n, lost.Load())
		}

		over, cancel := context.WithCancel(t.Context())
		cancel()
		if err := l.Shutdown(over); !errors.Is(err, context.Canceled) || abandoned.Load() != n {
			t.Errorf("Shutdown returned %v and abandoned %d of %d", err, abandoned.Load(), n)
		}
		for _, k := range locks {
			checkDead(t, k)
		}
		lean("after Shutdown")
	})
}

// trips is a go-redis hook that counts the extensions by how they are sent.
type trips struct {
	mu                     sync.Mutex
	alone, trips, together int
}

func (*trips) DialHook(next redis.DialHook) redis.DialHook { return next }

func (c *trips) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if slices.Contains(cmd.Args(), any(extendScript.Hash())) {
			c.mu.Lock()
			c.alone++
			c.mu.Unlock()
		}
		return next(ctx, cmd)
	}
}

func (c *trips) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if slices.Contains(cmds[0].Args(), any(extendScript.Hash())) {
			c.mu.Lock()
			c.trips++
			c.together += len(cmds)
			c.mu.Unlock()
		}
		return next(ctx, cmds)
	}
}

// take returns how many extensions have been sent since the last call: each alone, and in how many round trips how many together.
func (c *trips) take() (alone, trips, together int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	alone, trips, together = c.alone, c.trips, c.together
	c.alone, c.trips, c.together = 0, 0, 0
	return alone, trips, together
}

// heldLocks takes n locks within n milliseconds, on a client with a hook that counts their extensions.
func heldLocks(t *testing.T, h *virtual.Host, b *books, n int, opts ...Option) (l *Locker, locks []*Lock, c *trips) {
	t.Helper()
	teachScripts(h.World)
	c = new(trips)
	h.RDB.AddHook(c)
	l = locker(h, b, opts...)
	for i := range n {
		locks = append(locks, heldLock(t, l, fmt.Sprint(i)))
		time.Sleep(time.Millisecond)
	}
	return l, locks, c
}

// allHeld fails the test unless the locks are held, and Redis's TTL of each is at least left.
func allHeld(t *testing.T, w *virtual.World, locks []*Lock, left time.Duration) {
	t.Helper()
	for _, k := range locks {
		if cause := context.Cause(k.Context()); cause != nil {
			t.Fatalf("%s was lost: %v", k.key, cause)
		}
		if value, _ := w.Redis.Get(k.key); value != valueOf(k) || w.Redis.TTL(k.key) < left {
			t.Fatalf("the TTL of %s is %s, want %s at least; it holds %q", k.key, w.Redis.TTL(k.key), left, value)
		}
	}
}

func releaseAll(t *testing.T, l *Locker, locks []*Lock) {
	t.Helper()
	for _, k := range locks {
		if err := k.Release(t.Context()); err != nil {
			t.Error(err)
		}
		checkDead(t, k)
	}
	checkIdle(t, l)
}

func TestManyLocksAreExtendedInFewRoundTrips(t *testing.T) {
	for _, test := range []struct {
		n     int
		ttl   time.Duration
		tune  func(*redis.Options)
		trips int // at most, in a third of the TTL
	}{
		{together, 30 * time.Second, once, 1},
		{2*together + 50, 30 * time.Second, once, 3},
		{2*together + 50, 30 * time.Second, patient, 3},
		{2*together + 50, 3 * time.Second, once, 5}, // taken within 250 ms, and extended up to 50 ms early
	} {
		t.Run(fmt.Sprintf("%d for %s", test.n, test.ttl), func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				l, locks, c := heldLocks(t, w.Host("h", test.tune), &b, test.n, WithTTL(test.ttl))
				for i := range 6 {
					time.Sleep(test.ttl / 3)
					if alone, trips, got := c.take(); alone > 0 || got != test.n || trips > test.trips {
						t.Errorf("third %d: %d extended alone and %d in %d round trips, want all in %d", i+1, alone, got, trips, test.trips)
					}
					allHeld(t, w, locks, test.ttl*9/10)
				}
				releaseAll(t, l, locks)
				b.want(t, fmt.Sprintf("acquired=%d released=%d", test.n, test.n))
			})
		})
	}
}

func TestAFewLocksAreExtendedEachAlone(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		const (
			n   = together - 1
			ttl = 30 * time.Second
		)
		var b books
		l, locks, c := heldLocks(t, w.Host("h"), &b, n, WithTTL(ttl))
		for i := range 3 {
			time.Sleep(ttl / 3)
			if alone, _, got := c.take(); alone != n || got > 0 {
				t.Errorf("third %d: %d extended alone and %d together, want each alone", i+1, alone, got)
			}
		}
		allHeld(t, w, locks, ttl*9/10)
		releaseAll(t, l, locks)
		b.want(t, fmt.Sprintf("acquired=%d released=%d", n, n))
	})
}

func TestOneOfManyLocksThatIsTakenAwayIsTheOnlyOneLost(t *testing.T) {
	const (
		n   = together + 50
		ttl = 30 * time.Second
	)
	for name, tamper := range map[string]func(w *virtual.World, key string){
		"deleted":    func(w *virtual.World, key string) { w.Redis.Del(key) },
		"stolen":     func(w *virtual.World, key string) { _ = w.Redis.Set(key, encodeValue(Holder{}, "another token")) },
		"wrong type": func(w *virtual.World, key string) { w.Redis.Del(key); w.Redis.HSet(key, "f", "v") },
	} {
		for _, i := range []int{0, 37, together, n - 1} {
			t.Run(fmt.Sprintf("%s/%d", name, i), func(t *testing.T) {
				virtual.Run(t, func(t *testing.T, w *virtual.World) {
					var b books
					l, locks, c := heldLocks(t, w.Host("h"), &b, n, WithTTL(ttl))
					time.Sleep(ttl / 3)
					victim := locks[i]
					tamper(w, victim.key)
					time.Sleep(ttl / 3)
					if cause := context.Cause(victim.Context()); !errors.Is(cause, ErrLost) {
						t.Errorf("after its next extension its context has ended by %v, want ErrLost", cause)
					}
					others := slices.Delete(slices.Clone(locks), i, i+1)
					allHeld(t, w, others, ttl-time.Second)
					if alone, trips, got := c.take(); alone > 0 || trips != 4 || got != 2*n {
						t.Errorf("%d extended alone and %d together in %d round trips, want all twice, in 4", alone, got, trips)
					}
					time.Sleep(2 * ttl)
					allHeld(t, w, others, ttl-ttl/3-time.Second)
					if err := victim.Release(t.Context()); !errors.Is(err, ErrLost) {
						t.Errorf("Release says %v, want ErrLost", err)
					}
					releaseAll(t, l, others)
					b.want(t, fmt.Sprintf("acquired=%d lost=1 released=%d", n, n-1))
				})
			})
		}
	}
}

func TestManyLocksOutliveAnAbsenceOfAThirdOfTheirTTL(t *testing.T) {
	const (
		n   = together + 50
		ttl = 30 * time.Second
	)
	for name, fail := range map[string]func(*virtual.Link){
		"hangs": (*virtual.Link).Hang,
		"cut":   (*virtual.Link).Cut,
		"LOADING": func(l *virtual.Link) {
			l.Every(extendScript.Hash()).Refuse("LOADING Redis is loading the dataset in memory")
		},
	} {
		t.Run(name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				h := w.Host("h", once)
				l, locks, c := heldLocks(t, h, &b, n, WithTTL(ttl))
				time.Sleep(ttl/3 - time.Second)
				fail(h.LockLink)
				time.Sleep(ttl/3 + 500*time.Millisecond)
				if alone, trips, got := c.take(); alone < n || trips != 2 || got != n {
					t.Errorf("%d extended alone and %d in %d round trips, want each together once, and then alone", alone, got, trips)
				}
				h.LockLink.Heal()
				time.Sleep(2 * time.Second)
				allHeld(t, w, locks, ttl-3*time.Second)
				if alone, _, got := c.take(); alone < n || got > 0 {
					t.Errorf("after healing %d extended alone and %d together, want each alone", alone, got)
				}
				for i := range 3 {
					time.Sleep(ttl / 3)
					// In more round trips where they had failed at different times.
					if alone, trips, got := c.take(); alone > 0 || got != n || trips > 4 {
						t.Errorf("third %d after healing: %d extended alone and %d in %d round trips, want all together", i+1, alone, got, trips)
					}
					allHeld(t, w, locks, ttl-3*time.Second)
				}
				releaseAll(t, l, locks)
				b.want(t, fmt.Sprintf("acquired=%d released=%d", n, n))
			})
		})
	}
}

func TestAConfirmationOfManyLocksCountsFromWhenItsRequestWasSent(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		const (
			n    = together
			ttl  = 30 * time.Second
			late = 5 * time.Second
		)
		var b books
		h := w.Host("h", patient)
		l, locks, _ := heldLocks(t, h, &b, n, WithTTL(ttl))
		h.LockLink.Next(extendScript.Hash()).DelayReply(late)
		time.Sleep(ttl/3 + late)
		for _, k := range locks {
			left, err := k.validity()
			if most := ttl - ttl/10 - late; err != nil || left > most || left < most-time.Second {
				t.Fatalf("%s is valid for %s more (%v), want %s", k.key, left, err, most)
			}
		}
		releaseAll(t, l, locks)
		b.want(t, fmt.Sprintf("acquired=%d released=%d", n, n))
	})
}

func TestAFlushOfTheScriptsCostsManyLocksAFewRoundTrips(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		const (
			n   = together + 50
			ttl = 30 * time.Second
		)
		var b books
		l, locks, c := heldLocks(t, w.Host("h"), &b, n, WithTTL(ttl))
		for i, flush := range []bool{true, true, false} {
			victim := locks[40*i]
			w.Alone(func() {
				if flush {
					_ = w.RDB.ScriptFlush(t.Context()).Err()
				}
				w.Redis.Del(victim.key)
			})
			locks = slices.DeleteFunc(locks, func(k *Lock) bool { return k == victim })
			time.Sleep(ttl / 3)
			alone, trips, got := c.take()
			if flush && (alone < 1 || alone > 2 || trips > 4) || !flush && (alone > 0 || trips > 2) || got < len(locks)+1 {
				t.Errorf("third %d, flushed %t: %d extended alone and %d in %d round trips", i+1, flush, alone, got, trips)
			}
			allHeld(t, w, locks, ttl-time.Second)
			if cause := context.Cause(victim.Context()); !errors.Is(cause, ErrLost) {
				t.Errorf("the lock that was taken away ended by %v, want ErrLost", cause)
			}
			_ = victim.Release(t.Context())
		}
		releaseAll(t, l, locks)
		b.want(t, fmt.Sprintf("acquired=%d lost=3 released=%d", n, n-3))
	})
}

func TestAnIdleLockerOwnsNothing(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		const ttl = 3 * time.Second
		var b books
		h := w.Host("h")
		l := locker(h, &b, WithTTL(ttl), WithGracePeriod(time.Second))
		time.Sleep(time.Hour)
		if stats := h.RDB.PoolStats(); stats.TotalConns != 0 || len(h.LockLink.Sent("")) > 0 {
			t.Errorf("before its first use: %d connections, commands %v", stats.TotalConns, h.LockLink.Sent(""))
		}
		checkIdle(t, l)

		// Then every way in which a lock can end or not begin.
		released := heldLock(t, l, "released")
		_, _ = l.TryAcquire(t.Context(), "released")
		_ = l.Do(t.Context(), "done", func(context.Context) error { return nil })
		_ = released.Release(t.Context())
		ctx, cancel := context.WithCancel(t.Context())
		_ = l.Do(ctx, "abandoned", func(context.Context) error { cancel(); time.Sleep(2 * ttl); return nil })
		deleted, lost := heldLock(t, l, "deleted"), heldLock(t, l, "lost")
		w.Redis.Del(deleted.Key())
		awaitEnd(deleted)
		h.LockLink.Hang()
		_, _ = l.TryAcquire(t.Context(), "unavailable")
		awaitEnd(lost)
		h.LockLink.Heal()
		_, _ = deleted.Release(t.Context()), lost.Release(t.Context())
		time.Sleep(time.Minute)

		b.want(t, "abandoned=1 acquired=5 lost=2 released=2")
		h.LockLink.Forget()
		time.Sleep(time.Hour)
		if sent := h.LockLink.Sent(""); len(sent) > 0 {
			t.Errorf("%d commands in an idle hour: %v", len(sent), sent[0])
		}
		for _, k := range []*Lock{released, deleted, lost} {
			checkDead(t, k)
		}
		checkIdle(t, l)
		if keys := w.Redis.Keys(); len(keys) > 0 {
			t.Errorf("keys left: %v", keys)
		}
		over, stop := context.WithCancel(t.Context())
		stop()
		if err := l.Shutdown(over); err != nil {
			t.Errorf("Shutdown of an idle Locker waits for something: %v", err)
		}
	})
}

// Hosts fight for a few locks over links that fail at random, in whatever way and at whichever command. Their work ends
// as soon as its context does, so there must never be two at once, and in the end nothing may be left.
func TestNoWeatherMakesTwoHoldersOfOneLock(t *testing.T) {
	const (
		ttl   = 3 * time.Second
		hosts = 3
		names = 3
		lasts = 90 * time.Second
		most  = time.Hour // for a world in which too little happens at first
	)
	for seed := range uint64(2) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				var runs virtual.Tally
				var fights sync.WaitGroup
				var lockers []*Locker
				var all []*virtual.Host
				// The seed fixes the weather but not the order of goroutines within an instant, so how much comes of it differs.
				enough := func() bool { return b.count(EventAcquired) >= 40 && b.count(EventLost) >= 3 }
				on := func() bool { return w.Elapsed() < lasts || w.Elapsed() < most && !enough() }
				for i := range hosts {
					h := w.Host(fmt.Sprintf("h%d", i))
					l := locker(h, &b, WithTTL(ttl))
					all, lockers = append(all, h), append(lockers, l)
					for j := range names {
						random := rand.New(rand.NewPCG(seed, uint64(100+i*names+j)))
						fights.Go(func() {
							name := fmt.Sprint(j)
							for on() {
								_ = l.Do(t.Context(), name, func(ctx context.Context) error {
									defer runs.Start(name)()
									return virtual.Busy(ctx, time.Duration(random.Int64N(int64(2*ttl))))
								})
								time.Sleep(time.Duration(random.Int64N(int64(ttl / 3))))
							}
						})
					}
					fights.Go(func() { weather(h, rand.New(rand.NewPCG(seed, uint64(i))), on, ttl) })
				}
				fights.Wait()
				for _, h := range all {
					h.LockLink.Heal()
				}
				if got := runs.Overlaps(); len(got) > 0 {
					t.Errorf("two at once, %d times: %s", len(got), got[0])
				}
				time.Sleep(6 * ttl) // releases under way, and go-redis's timeouts
				if keys := w.Redis.Keys(); len(keys) > 0 {
					t.Errorf("keys left: %v", keys)
				}
				for _, l := range lockers {
					checkIdle(t, l)
				}
				b.balance(t, 0)
				if !enough() {
					t.Errorf("the weather was too bad or too good to prove anything in %s: %s", most, &b)
				}
			})
		})
	}
}

// weather makes something happen to the host's link about once per TTL, while on says so.
func weather(h *virtual.Host, random *rand.Rand, on func() bool, ttl time.Duration) {
	some := func(most time.Duration) time.Duration { return time.Duration(random.Int64N(int64(most))) }
	commands := []string{"", "SET", extendScript.Hash(), releaseScript.Hash()}
	for on() {
		time.Sleep(some(2 * ttl))
		l := h.LockLink
		f := l.Next(commands[random.IntN(len(commands))])
		if random.IntN(3) == 0 {
			f.Times(5)
		}
		switch random.IntN(12) {
		case 0:
			f.LoseRequest()
		case 1:
			f.LoseReply()
		case 2:
			f.SwallowRequest()
		case 3:
			f.SwallowReply()
		case 4:
			f.Delay(some(2 * ttl))
		case 5:
			f.DelayReply(some(2 * ttl))
		case 6:
			f.Refuse("LOADING Redis is loading the dataset in memory")
		case 7:
			_ = h.World.RDB.ScriptFlush(h.World.T.Context()).Err()
		case 8:
			l.Slow(some(ttl / 4))
		case 9:
			l.Cut()
			time.Sleep(some(2 * ttl))
			l.Heal()
		case 10:
			l.Hang()
			time.Sleep(some(2 * ttl))
			l.Heal()
		default:
			l.Heal()
		}
	}
}

func TestLocksInDoubtAreTriedNoOftenerBecauseThereAreMany(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		const (
			n   = 3 * together
			ttl = 12 * time.Second
		)
		var b books
		h := w.Host("h", once)
		l, locks, c := heldLocks(t, h, &b, n, WithTTL(ttl))
		h.LockLink.Hang()
		for _, k := range locks {
			awaitEnd(k)
		}
		// At TTL/3 together, then alone: at most every retryInterval of the rest of its validity.
		if alone, _, got := c.take(); got != n || alone > n*int((ttl*9/10-ttl/3)/retryInterval(ttl)) {
			t.Errorf("%d extended together and %d alone", got, alone)
		}
		h.LockLink.Heal()
		time.Sleep(ttl)
		for _, k := range locks {
			checkDead(t, k)
			_ = k.Release(t.Context())
		}
		checkIdle(t, l)
		b.want(t, fmt.Sprintf("acquired=%d lost=%d", n, n))
	})
}

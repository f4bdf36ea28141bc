package redislock

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"testing"
	"time"

	"example.com/redislock/internal/virtual"
	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
)

// k1Fence is the fence counter of the lock "n".
const k1Fence = k1 + ":fence"

// fenceOf returns the fencing number of a lock or ends the test.
func fenceOf(t *testing.T, k *Lock) int64 {
	t.Helper()
	n, ok := k.Fence()
	if !ok || n <= 0 {
		t.Fatalf("fence is %d, %v", n, ok)
	}
	return n
}

// takeFence takes and frees the lock of "n", and returns its number.
func takeFence(t *testing.T, l *Locker) int64 {
	t.Helper()
	k := heldLock(t, l, "n")
	defer func() { _ = k.Release(t.Context()) }()
	return fenceOf(t, k)
}

// counter returns what is at the fence counter of "n" or ends the test.
func counter(w *virtual.World) int64 {
	w.T.Helper()
	text, err := w.Redis.Get(k1Fence)
	n, bad := strconv.ParseInt(text, 10, 64)
	if err != nil || bad != nil {
		w.T.Fatalf("the counter is %q: %v", text, err)
	}
	return n
}

func TestAFenceGrowsThroughWhateverEndsTheLockBefore(t *testing.T) {
	const ttl = 10 * time.Second
	release := func(w *virtual.World, k *Lock) {
		if err := k.Release(w.T.Context()); err != nil {
			w.T.Error(err)
		}
	}
	for name, end := range map[string]func(*virtual.World, *Lock){
		"release": release, // in the same microsecond, since virtual time stands still
		"expiry":  func(_ *virtual.World, k *Lock) { stopWatchdog(k); time.Sleep(ttl) },
		"expiry of the counter as well": func(w *virtual.World, k *Lock) {
			release(w, k)
			time.Sleep(fenceLifetime)
			if w.Redis.Exists(k1Fence) {
				w.T.Error("the counter is kept for longer than a day")
			}
		},
		"FLUSHALL":                     func(w *virtual.World, k *Lock) { time.Sleep(time.Microsecond); w.Redis.FlushAll() },
		"a failover without the lock":  func(w *virtual.World, k *Lock) { w.Redis.Del(k.Key()) },
		"a failover without a counter": func(w *virtual.World, k *Lock) { time.Sleep(time.Microsecond); release(w, k); w.Redis.Del(k1Fence) },
		"a clock that goes back": func(w *virtual.World, k *Lock) {
			release(w, k)
			ahead := time.Now().Add(time.Hour).UnixMicro() // which is the same as a clock that has gone back by an hour
			_ = w.Redis.Set(k1Fence, fmt.Sprint(ahead))
			k.claim.Fence = ahead
		},
		"a done marker": func(w *virtual.World, k *Lock) {
			<-k.release(true)
			w.Redis.Del(k.Key())
		},
	} {
		t.Run(name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				l := locker(w.Host("h"), &b, WithTTL(ttl), WithFencing(), WithDoneFor(time.Hour))
				first := heldLock(t, l, "n")
				if got, now := fenceOf(t, first), time.Now().UnixMicro(); got != now {
					t.Errorf("the first number is %d, want Redis's time, %d", got, now)
				}
				end(w, first)
				second := heldLock(t, locker(w.Host("other"), &b, WithTTL(ttl), WithFencing(), WithDoneFor(time.Hour)), "n")
				if was, is := first.claim.Fence, fenceOf(t, second); is <= was || is != counter(w) {
					t.Errorf("%d came after %d, and the counter is %d", is, was, counter(w))
				}
				if left := w.Redis.TTL(k1Fence); left != fenceLifetime {
					t.Errorf("the counter has %v to live, want %v", left, fenceLifetime)
				}
				if left := w.Redis.TTL(k1); left != ttl {
					t.Errorf("the lock has %v to live, want %v", left, ttl)
				}
				_ = second.Release(t.Context())
				_ = first.Release(t.Context())
			})
		})
	}
}

// A second try of a command whose reply was lost is no second lock, so it has no second number.
func TestALostReplyOfAFencedAcquireKeepsItsNumber(t *testing.T) {
	for name, lose := range lostReplies {
		t.Run(name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				const ttl = 30 * time.Second
				var b books
				teachScripts(w)
				h := w.Host("h")
				l := locker(h, &b, WithTTL(ttl), WithFencing())
				lost := lose(h.LockLink.Next(acquireScript.Hash()))
				var first int64
				h.LockLink.Next(acquireScript.Hash()).Before(func() { first = counter(w) }) // meets the second send
				k := heldLock(t, l, "n")
				if lost.Hits() != 1 || len(h.LockLink.Sent(acquireScript.Hash())) != 2 {
					t.Errorf("want the command twice, its first reply lost: %v", h.LockLink.Sent(""))
				}
				if is := fenceOf(t, k); is != first || counter(w) != first {
					t.Errorf("the first try took %d, the second has %d, and the counter is %d", first, is, counter(w))
				}
				if left := w.Redis.TTL(k1); left != ttl {
					t.Errorf("the lock begins with %v of its TTL, want all of %v", left, ttl)
				}
				if until := k.validUntil; until.After(h.LockLink.Sent(acquireScript.Hash())[0].At.Add(ttl - ttl/10)) {
					t.Errorf("valid until %v, which is counted from the second send", until)
				}
				_ = k.Release(t.Context())
				b.want(t, "acquired=1 released=1")
			})
		})
	}
}

func TestAFencedAcquireWithUnknownOutcomeIsGivenBack(t *testing.T) {
	for name, fault := range map[string]func(*virtual.Fault){
		"connection breaks":       func(f *virtual.Fault) { f.LoseReply() },
		"silence":                 func(f *virtual.Fault) { f.SwallowReply() },
		"slower than TTL/4":       func(f *virtual.Fault) { f.Delay(2600 * time.Millisecond) },
		"reply slower than TTL/4": func(f *virtual.Fault) { f.DelayReply(2600 * time.Millisecond) },
	} {
		t.Run(name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				teachScripts(w)
				h := w.Host("h", once)
				l := locker(h, &b, WithTTL(10*time.Second), WithFencing())
				fault(h.LockLink.Next(acquireScript.Hash()))
				if _, err := l.TryAcquire(t.Context(), "n"); !errors.Is(err, ErrUnavailable) {
					t.Errorf("error is %v, want ErrUnavailable", err)
				}
				time.Sleep(3 * time.Second)
				if w.Redis.Exists(k1) {
					t.Error("the claim is still there")
				}
				before := counter(w)
				if is := takeFence(t, l); is <= before {
					t.Errorf("%d came after %d", is, before)
				}
			})
		})
	}
}

// Lua knows numbers up to 2^53 only, and prints large ones as 1e+15.
func TestAFenceIsExactUpToTheLargestInt64(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		l := locker(w.Host("h"), &b, WithFencing())
		for _, stored := range []int64{1<<53 - 1, 1 << 53, 1<<53 + 1, 1e18, 1e18 - 1, math.MaxInt64 - 1} {
			_ = w.Redis.Set(k1Fence, fmt.Sprint(stored))
			if n := takeFence(t, l); n != stored+1 {
				t.Errorf("%d came after %d", n, stored)
			}
		}
		for _, stored := range []int64{0, 1, 999_999, 1e14} { // long past: Redis's time takes over
			_ = w.Redis.Set(k1Fence, fmt.Sprint(stored))
			if n := takeFence(t, l); n != time.Now().UnixMicro() {
				t.Errorf("%d came after %d, want Redis's time", n, stored)
			}
		}
	})
}

// Redis tells its time in seconds and microseconds, the latter without zeros in front.
func TestAFenceCountsMicrosecondsInEveryPartOfASecond(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		l := locker(w.Host("h"), &b, WithFencing())
		for _, part := range []time.Duration{0, 1, 10, 999, 1000, 99_999, 100_000, 999_999} {
			now := time.Now()
			time.Sleep(time.Until(now.Truncate(time.Second).Add(time.Second + part*time.Microsecond)))
			if n := takeFence(t, l); n != time.Now().UnixMicro() {
				t.Errorf("%d µs into a second the number is %d, want %d", part, n, time.Now().UnixMicro())
			}
		}
	})
}

func TestAFenceCounterThatIsNoneIsAFailureAndLeavesTheLockFree(t *testing.T) {
	for name, put := range map[string]func(*virtual.World){
		"text":           func(w *virtual.World) { _ = w.Redis.Set(k1Fence, "many") },
		"a fraction":     func(w *virtual.World) { _ = w.Redis.Set(k1Fence, "1.5") },
		"negative":       func(w *virtual.World) { _ = w.Redis.Set(k1Fence, "-1") },
		"the largest":    func(w *virtual.World) { _ = w.Redis.Set(k1Fence, fmt.Sprint(math.MaxInt64)) },
		"larger":         func(w *virtual.World) { _ = w.Redis.Set(k1Fence, "9223372036854775808") },
		"another type":   func(w *virtual.World) { _, _ = w.Redis.Lpush(k1Fence, "1") },
		"nothing at all": func(w *virtual.World) { _ = w.Redis.Set(k1Fence, "") },
	} {
		t.Run(name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				put(w)
				before, _ := w.Redis.Get(k1Fence)
				_, err := locker(w.Host("h"), &b, WithFencing()).TryAcquire(t.Context(), "n")
				if err == nil || errors.Is(err, ErrUnavailable) || errors.Is(err, ErrHeld) || !strings.Contains(err.Error(), k1) {
					t.Errorf("error is %v, want a plain one that names the key", err)
				}
				if after, _ := w.Redis.Get(k1Fence); after != before || w.Redis.Exists(k1) {
					t.Errorf("the counter was %q and is %q; the lock is there: %v", before, after, w.Redis.Exists(k1))
				}
				b.want(t, "")
			})
		})
	}
}

// Whatever stands in the way of a fenced lock is told as it is without fencing.
func TestAFencedAcquireFindsTheKeyTaken(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		l := locker(w.Host("h"), &b, WithFencing(), WithDoneFor(time.Hour))
		k := heldLock(t, l, "n")
		was := counter(w)
		if _, err := l.TryAcquire(t.Context(), "n"); !errors.Is(err, ErrHeld) {
			t.Errorf("error is %v, want ErrHeld", err)
		}
		<-k.release(true)
		if _, err := l.TryAcquire(t.Context(), "n"); !errors.Is(err, ErrDone) {
			t.Errorf("error is %v, want ErrDone", err)
		}
		for _, foreign := range []string{"", "foreign"} {
			_ = w.Redis.Set(k1, foreign)
			if _, err := l.TryAcquire(t.Context(), "n"); !errors.Is(err, errForeignValue) {
				t.Errorf("%q at the key: error is %v, want %v", foreign, err, errForeignValue)
			}
		}
		if counter(w) != was {
			t.Errorf("the counter has moved from %d to %d without a new lock", was, counter(w))
		}
	})
}

func TestAFencedAcquireTakesOneRoundTrip(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		teachScripts(w)
		h := w.Host("h")
		l := locker(h, &b, WithFencing())
		_ = heldLock(t, l, "n").Release(t.Context())
		sent := h.LockLink.Sent("")
		if len(sent) != 2 || len(h.LockLink.Sent(acquireScript.Hash())) != 1 {
			t.Errorf("commands are %v, want one for the acquire and one for the release", sent)
		}
		_ = w.RDB.ScriptFlush(t.Context())
		_ = heldLock(t, l, "n").Release(t.Context()) // by EVAL
		b.want(t, "acquired=2 released=2")
	})
}

func TestWithoutWithFencingThereIsNoNumberAndNoCounter(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		k := heldLock(t, locker(w.Host("h"), &b), "n")
		if n, ok := k.Fence(); n != 0 || ok {
			t.Errorf("fence is %d, %v", n, ok)
		}
		if keys := lockKeys(w); len(keys) != 1 {
			t.Errorf("keys are %v", keys)
		}
		_ = k.Release(t.Context())
	})
}

func TestAHandlerReachesItsFence(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		fences := make(chan int64, 2)
		s := lockedService(w.Host("h"), func(ctx context.Context) error {
			k, _ := FromContext(ctx)
			fences <- fenceOf(t, k)
			if len(fences) == 1 {
				return errors.New("once more")
			}
			return nil
		}, WithFencing())
		info := w.Enqueue(s.task, asynq.MaxRetry(1))
		s.start()
		w.Until(time.Hour, "task gone", func() bool { return w.State(info) == "gone" })
		s.finishes(time.Second)
		if first, second := <-fences, <-fences; first >= second {
			t.Errorf("%d came after %d", second, first)
		}
	})
}

func TestOnRealServersAFenceGrows(t *testing.T) {
	eachServer(t, func(t *testing.T, s *server) {
		t.Parallel()
		var b books
		rdb := s.client(t)
		l := realLocker(t, rdb, &b, WithFencing())
		ctx, last, key := t.Context(), int64(0), l.prefix+"{n}"
		next := func(after string) {
			t.Helper()
			k := heldLock(t, l, "n")
			n := fenceOf(t, k)
			if n <= last {
				t.Errorf("after %s, %d came after %d", after, n, last)
			}
			for _, key := range []string{key, key + ":fence"} {
				if left := rdb.PTTL(ctx, key).Val(); left <= 0 {
					t.Errorf("after %s, %s has a TTL of %v", after, key, left)
				}
			}
			last = n
			_ = k.Release(ctx)
		}
		next("nothing")
		for range 100 {
			next("a release")
		}
		rdb.FlushAll(ctx)
		next("FLUSHALL")
		s.restart()
		next("a restart without data")
		rdb.ScriptFlush(ctx)
		next("SCRIPT FLUSH")
		for _, stored := range []int64{1 << 53, 1<<53 + 1, math.MaxInt64 - 1} {
			rdb.Set(ctx, key+":fence", stored, time.Hour)
			last = stored
			next(fmt.Sprint(stored))
			if last != stored+1 {
				t.Errorf("%d came after %d", last, stored)
			}
		}
		if _, err := l.TryAcquire(ctx, "n"); err == nil || errors.Is(err, ErrUnavailable) {
			t.Errorf("after the largest number: %v", err)
		}
		b.balance(t, 0)
	})
}

func TestOnRealServersALostReplyOfAFencedAcquireKeepsItsNumber(t *testing.T) {
	eachServer(t, func(t *testing.T, s *server) {
		t.Parallel()
		var b books
		direct, p := s.client(t), newProxy(t, s.addr)
		l := realLocker(t, s.client(t, func(o *redis.Options) { o.Addr = p.addr }), &b, WithFencing())
		_ = heldLock(t, l, "teaches the script").Release(t.Context())
		key := l.prefix + "{n}"
		lost := p.swallow(key)
		first := make(chan int64, 1)
		go func() {
			<-lost
			n, _ := direct.Get(context.WithoutCancel(t.Context()), key+":fence").Int64()
			first <- n
		}()
		k := heldLock(t, l, "n")
		if is, was := fenceOf(t, k), <-first; is != was {
			t.Errorf("the first try took %d, the second has %d", was, is)
		}
		_ = k.Release(t.Context())
		b.want(t, "acquired=2 released=2")
	})
}

// What a replica says, or a primary without its replicas, may be old: no reason to drop a task.
func TestOnRealServersAFencedAcquireBelievesNobodyWhoMayBeBehind(t *testing.T) {
	eachServer(t, func(t *testing.T, s *server) {
		t.Parallel()
		var b books
		rdb := s.client(t)
		for name, opts := range map[string][]Option{"plain": nil, "fenced": {WithFencing()}} {
			k, l := heldLock(t, realLocker(t, rdb, &b, opts...), name), realLocker(t, rdb, &b, opts...)
			for _, in := range [][2][]any{
				{{"CONFIG", "SET", "min-replicas-to-write", 1}, {"CONFIG", "SET", "min-replicas-to-write", 0}},
				{{"REPLICAOF", "127.0.0.1", 1}, {"REPLICAOF", "NO", "ONE"}},
			} {
				if err := rdb.Do(t.Context(), in[0]...).Err(); err != nil {
					t.Fatal(err)
				}
				if _, err := l.TryAcquire(t.Context(), name); !errors.Is(err, ErrUnavailable) {
					t.Errorf("%s, after %v: error is %v, want ErrUnavailable", name, in[0], err)
				}
				if err := rdb.Do(t.Context(), in[1]...).Err(); err != nil {
					t.Fatal(err)
				}
			}
			_ = k.Release(t.Context())
		}
	})
}

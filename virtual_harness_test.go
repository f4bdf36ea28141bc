package redislock

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
)

// The harness is code too: what follows shows that it does what it says.

func TestWorldRunsAsynq(t *testing.T) {
	virtual(t, func(t *testing.T, w *world) {
		var runs tally
		for i := range 3 {
			w.host(fmt.Sprintf("h%d", i)).serve(asynq.Config{}, asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
				defer runs.start(string(task.Payload()))()
				return busy(ctx, 5*time.Second)
			}))
		}
		var infos []*asynq.TaskInfo
		for i := range 20 {
			infos = append(infos, w.enqueue(asynq.NewTask("work", fmt.Append(nil, i))))
		}
		w.until(30*time.Second, "all tasks done", func() bool { return w.drained() })
		for i, info := range infos {
			if n := runs.count(fmt.Sprint(i)); n != 1 {
				t.Errorf("task %d ran %d times, want 1", i, n)
			}
			if s := w.state(info); s != "gone" {
				t.Errorf("task %d is %s, want gone", i, s)
			}
		}
		if s := w.stats("default"); s.Processed != 20 || s.Failed != 0 {
			t.Errorf("processed %d, failed %d; want 20, 0", s.Processed, s.Failed)
		}
		if took := w.elapsed(); took > 20*time.Second {
			t.Errorf("20 tasks of 5 s in 30 slots took %s", took)
		}
	})
}

func TestWorldRunsSchedulers(t *testing.T) {
	virtual(t, func(t *testing.T, w *world) {
		var runs tally
		h := w.host("h")
		h.serve(asynq.Config{TaskCheckInterval: time.Minute, DelayedTaskCheckInterval: time.Minute},
			asynq.HandlerFunc(func(context.Context, *asynq.Task) error {
				runs.start("hourly")()
				return nil
			}))
		h.schedule("@hourly", asynq.NewTask("report", nil))
		time.Sleep(2*time.Hour + 2*time.Minute)
		got := runs.of("hourly")
		if len(got) != 2 {
			t.Fatalf("ran %d times in two hours, want 2", len(got))
		}
		for i, r := range got {
			due := w.began.Add(time.Duration(i+1) * time.Hour)
			if late := r.start.Sub(due); late < 0 || late > 2*time.Minute {
				t.Errorf("run %d came %s after the hour", i, late)
			}
		}
	})
}

func TestWorldRedeliversWhenALeaseExpires(t *testing.T) {
	virtual(t, func(t *testing.T, w *world) {
		var runs tally
		handler := func(h *host) asynq.HandlerFunc {
			return func(context.Context, *asynq.Task) error {
				defer runs.start("on " + h.name)()
				if h.name == "lost" {
					w.deaf(time.Hour)
				}
				return nil
			}
		}
		lost, other := w.host("lost"), w.host("other")
		lost.serve(asynq.Config{}, handler(lost))
		info := w.enqueue(asynq.NewTask("work", nil), asynq.MaxRetry(5), asynq.Timeout(time.Hour))
		w.until(5*time.Second, "task running", func() bool { return runs.running("on lost") == 1 })
		lost.queueLink.cut()
		other.serve(asynq.Config{RetryDelayFunc: func(int, error, *asynq.Task) time.Duration { return time.Second }}, handler(other))

		w.until(3*time.Minute, "task run by the other host", func() bool { return runs.count("on other") == 1 })
		w.until(time.Minute, "task gone", func() bool { return w.state(info) == "gone" })
		if took := w.elapsed(); took < time.Minute {
			t.Errorf("redelivered after %s; asynq waits for the lease and 30 s more", took)
		}
		if w.task(info) != nil {
			t.Error("the inspector still knows the task")
		}
		if runs.running("on lost") != 1 {
			t.Error("the deaf handler should still be running: nothing ended it")
		}
		if !w.logged("lost asynq error Failed to extend lease") && !w.logged("lost asynq error Failed to write server state") {
			t.Error("the cut host's heartbeat did not complain")
		}
	})
}

func TestWorldRequeuesOnShutdown(t *testing.T) {
	virtual(t, func(t *testing.T, w *world) {
		var runs tally
		srv := w.host("first").serve(asynq.Config{ShutdownTimeout: time.Second},
			asynq.HandlerFunc(func(context.Context, *asynq.Task) error {
				defer runs.start("work")()
				w.deaf(time.Minute)
				return nil
			}))
		info := w.enqueue(asynq.NewTask("work", nil))
		w.until(5*time.Second, "task running", func() bool { return runs.running("work") == 1 })
		srv.Shutdown()
		if s := w.state(info); s != "pending" || w.task(info).Retried != 0 {
			t.Fatalf("after shutdown the task is %s, want pending and no retry counted", s)
		}
		w.host("second").serve(asynq.Config{}, asynq.HandlerFunc(func(context.Context, *asynq.Task) error {
			defer runs.start("work")()
			return nil
		}))
		w.until(5*time.Second, "task gone", func() bool { return w.state(info) == "gone" })
		if got := runs.overlaps(); len(got) != 1 {
			t.Errorf("without a lock the two runs overlap once; tally says %q", got)
		}
	})
}

func TestWorldExpiresKeysExactly(t *testing.T) {
	virtual(t, func(t *testing.T, w *world) {
		time.Sleep(13 * time.Millisecond)
		w.rdb.Set(t.Context(), "k", "v", time.Second)
		time.Sleep(999 * time.Millisecond)
		if ttl := w.redis.TTL("k"); ttl != time.Millisecond {
			t.Errorf("TTL after 999 ms is %s, want 1ms", ttl)
		}
		time.Sleep(2 * time.Millisecond)
		if w.redis.Exists("k") {
			t.Error("the key outlived its TTL")
		}
	})
}

// setNX is the command that most of this is about.
func setNX(ctx context.Context, h *host, value string) (string, error) {
	return h.rdb.SetArgs(ctx, "k", value, redis.SetArgs{Mode: "NX", Get: true, TTL: time.Minute}).Result()
}

func TestLinkLosesReplies(t *testing.T) {
	const timeout = 3 * time.Second // the client's
	for name, test := range map[string]struct {
		fault    func(*fault) *fault
		applied  bool // the first time
		min, max time.Duration
	}{
		"request, connection breaks": {(*fault).loseRequest, false, 0, time.Second},
		"request, silence":           {(*fault).swallowRequest, false, timeout, timeout + time.Second},
		"reply, connection breaks":   {(*fault).loseReply, true, 0, time.Second},
		"reply, silence":             {(*fault).swallowReply, true, timeout, timeout + time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T, w *world) {
				h := w.host("h")
				f := test.fault(h.lockLink.next("SET", "k"))
				var seen string // by Redis, before go-redis sends the command again
				h.lockLink.next("SET", "k").before(func() { seen, _ = w.redis.Get("k") })
				was, err := setNX(t.Context(), h, "mine")
				if test.applied && (err != nil || was != "mine" || seen != "mine") {
					t.Errorf("the command sent again found %q (%v), Redis had %q; want our own value", was, err, seen)
				}
				if !test.applied && (!errors.Is(err, redis.Nil) || seen != "") {
					t.Errorf("the command sent again found %q (%v), Redis had %q; want nothing", was, err, seen)
				}
				if took := w.elapsed(); took < test.min || took > test.max {
					t.Errorf("took %s, want %s to %s", took, test.min, test.max)
				}
				if n := len(h.lockLink.sent("SET", "k")); n != 2 || f.hits() != 1 {
					t.Errorf("%d commands, %d hit; want 2, 1", n, f.hits())
				}
				if v, _ := w.redis.Get("k"); v != "mine" {
					t.Errorf("key is %q", v)
				}
			})
		})
	}
}

func TestLinkCuts(t *testing.T) {
	virtual(t, func(t *testing.T, w *world) {
		h := w.host("h")
		if _, err := setNX(t.Context(), h, "a"); !errors.Is(err, redis.Nil) {
			t.Fatal(err)
		}
		h.lockLink.cut()
		_, err := setNX(t.Context(), h, "b")
		if !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("error is %v, want connection refused", err)
		}
		if err := h.queue.Ping(t.Context()).Err(); err != nil {
			t.Errorf("the other link is cut as well: %v", err)
		}
		h.lockLink.heal()
		if was, err := setNX(t.Context(), h, "c"); err != nil || was != "a" {
			t.Errorf("after heal: %q, %v", was, err)
		}
	})
}

func TestLinkCutWhileARequestIsUnderWay(t *testing.T) {
	virtual(t, func(t *testing.T, w *world) {
		h := w.host("h")
		h.lockLink.next("SET").delay(2 * time.Second)
		w.spawn(func() {
			time.Sleep(time.Second)
			h.lockLink.cut()
		})
		if _, err := setNX(t.Context(), h, "a"); err == nil || errors.Is(err, redis.Nil) {
			t.Errorf("error is %v", err)
		}
		time.Sleep(5 * time.Second)
		if w.redis.Exists("k") {
			t.Error("a request got over a cut link")
		}
	})
}

func TestLinkHangs(t *testing.T) {
	virtual(t, func(t *testing.T, w *world) {
		h := w.host("h", func(o *redis.Options) { o.ReadTimeout, o.MaxRetries = time.Second, 1 })
		h.rdb.Ping(t.Context())
		h.lockLink.hang()
		start := time.Now()
		_, err := setNX(t.Context(), h, "a")
		if netErr := net.Error(nil); !errors.As(err, &netErr) || !netErr.Timeout() {
			t.Errorf("error is %v, want a timeout", err)
		}
		if took := time.Since(start); took < 2*time.Second || took > 3*time.Second {
			t.Errorf("took %s, want twice the read timeout", took)
		}
		if w.redis.Exists("k") {
			t.Error("the request arrived")
		}
		h.lockLink.heal()
		if _, err := setNX(t.Context(), h, "a"); !errors.Is(err, redis.Nil) {
			t.Errorf("after heal: %v", err)
		}
	})
}

func TestLinkHangsForClientsWithoutTimeout(t *testing.T) {
	virtual(t, func(t *testing.T, w *world) {
		h := w.host("h", func(o *redis.Options) { o.ReadTimeout, o.MaxRetries = -1, -1 })
		h.rdb.Ping(t.Context())
		h.lockLink.hang()
		w.spawn(func() {
			time.Sleep(time.Hour)
			h.lockLink.heal()
		})
		if _, err := setNX(t.Context(), h, "a"); !errors.Is(err, io.EOF) {
			t.Errorf("error is %v, want a broken connection", err)
		}
		if took := w.elapsed(); took != time.Hour {
			t.Errorf("took %s, want an hour", took)
		}
	})
}

func TestLinkDelays(t *testing.T) {
	virtual(t, func(t *testing.T, w *world) {
		h := w.host("h")
		h.lockLink.next("SET").delay(time.Second)
		h.lockLink.next("SET").delayReply(time.Second)
		for _, ttl := range []time.Duration{time.Minute, 59 * time.Second} {
			start := time.Now()
			if _, err := setNX(t.Context(), h, "a"); !errors.Is(err, redis.Nil) {
				t.Fatal(err)
			}
			if took := time.Since(start); took != time.Second {
				t.Errorf("took %s, want 1s", took)
			}
			if left := w.redis.TTL("k"); left != ttl {
				t.Errorf("TTL is %s, want %s: a delayed request starts it late, a delayed reply does not", left, ttl)
			}
			w.redis.Del("k")
		}
		h.lockLink.slow(100 * time.Millisecond)
		start := time.Now()
		h.rdb.Get(t.Context(), "k")
		if took := time.Since(start); took != 100*time.Millisecond {
			t.Errorf("took %s on a slow link, want 100ms", took)
		}
	})
}

func TestLinkDeliversLateWhatTheClientGaveUp(t *testing.T) {
	virtual(t, func(t *testing.T, w *world) {
		h := w.host("h", func(o *redis.Options) { o.MaxRetries = -1 })
		h.lockLink.next("SET").delay(10 * time.Second)
		if err := h.rdb.Set(t.Context(), "k", "late", 0).Err(); err == nil || w.elapsed() > 4*time.Second {
			t.Errorf("%v after %s, want a timeout of 3s", err, w.elapsed())
		}
		if w.redis.Exists("k") {
			t.Error("it arrived at once")
		}
		time.Sleep(8 * time.Second)
		if v, _ := w.redis.Get("k"); v != "late" {
			t.Errorf("key is %q", v)
		}
	})
}

func TestLinkRefuses(t *testing.T) {
	for _, test := range []struct {
		text string
		sent int // go-redis sends some again, three times
	}{
		{"LOADING Redis is loading the dataset in memory", 4},
		{"READONLY You can't write against a read only replica.", 4},
		{"NOAUTH Authentication required.", 1},
		{"OOM command not allowed when used memory > 'maxmemory'.", 1},
	} {
		t.Run(strings.Fields(test.text)[0], func(t *testing.T) {
			virtual(t, func(t *testing.T, w *world) {
				h := w.host("h")
				f := h.lockLink.every("SET").refuse(test.text)
				if _, err := setNX(t.Context(), h, "a"); err == nil || err.Error() != test.text {
					t.Errorf("error is %v", err)
				}
				if n := len(h.lockLink.sent("SET")); n != test.sent || f.hits() != n {
					t.Errorf("sent %d times, want %d", n, test.sent)
				}
				f.lift()
				if _, err := setNX(t.Context(), h, "a"); !errors.Is(err, redis.Nil) {
					t.Errorf("after lift: %v", err)
				}
			})
		})
	}
}

func TestLinkRunsAHookAroundACommand(t *testing.T) {
	virtual(t, func(t *testing.T, w *world) {
		h := w.host("h")
		script := redis.NewScript(`return redis.call("GET", KEYS[1])`)
		h.lockLink.next(script.Hash(), "k").before(func() { w.redis.Set("k", "before") })
		h.lockLink.next("EVAL", "k").after(func() { w.redis.Set("k", "after") })
		v, err := script.Run(t.Context(), h.rdb, []string{"k"}).Text()
		if err != nil || v != "before" {
			t.Errorf("script says %q, %v", v, err)
		}
		if v, _ := w.redis.Get("k"); v != "after" {
			t.Errorf("key is %q", v)
		}
		// Sent by its hash first, which Redis did not know, and then by its text: one script, two commands.
		if n := len(h.lockLink.sent(script.Hash(), "k")); n != 2 {
			t.Errorf("%d commands of the script, want 2", n)
		}
		if n := len(h.lockLink.sent("", "other")); n != 0 {
			t.Errorf("%d commands about another key", n)
		}
		h.lockLink.forget()
		if n := len(h.lockLink.sent("")); n != 0 {
			t.Errorf("%d commands after forget", n)
		}
	})
}

func TestLinkCarriesPipelinesAndLargeValues(t *testing.T) {
	virtual(t, func(t *testing.T, w *world) {
		h := w.host("h")
		large := strings.Repeat("x", 1<<20)
		var get *redis.StringCmd
		_, err := h.rdb.TxPipelined(t.Context(), func(p redis.Pipeliner) error {
			for i := range 500 {
				p.Set(t.Context(), fmt.Sprint(i), large[:200], 0)
			}
			p.Set(t.Context(), "large", large, 0)
			get = p.Get(t.Context(), "large")
			return nil
		})
		if err != nil || get.Val() != large {
			t.Errorf("%v, %d bytes", err, len(get.Val()))
		}
	})
}

func TestLinkCarriesCancelationsAfterTrouble(t *testing.T) {
	for name, trouble := range map[string]func(*link){"cut": (*link).cut, "hang": (*link).hang} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T, w *world) {
				h := w.host("h")
				ended := make(chan error, 1)
				h.serve(asynq.Config{}, asynq.HandlerFunc(func(ctx context.Context, _ *asynq.Task) error {
					ended <- busy(ctx, time.Hour)
					return nil
				}))
				time.Sleep(time.Second)
				trouble(h.queueLink)
				time.Sleep(2 * time.Minute)
				h.queueLink.heal()
				time.Sleep(10 * time.Second) // resubscribed by then

				info := w.enqueue(asynq.NewTask("work", nil))
				w.until(10*time.Second, "task running", func() bool { return w.state(info) == "active" })
				if err := w.inspector.CancelProcessing(info.ID); err != nil {
					t.Fatal(err)
				}
				time.Sleep(time.Second)
				select {
				case err := <-ended:
					if !errors.Is(err, context.Canceled) {
						t.Errorf("handler ended with %v", err)
					}
				default:
					t.Error("the cancelation did not arrive")
				}
			})
		})
	}
}

// A refused command is not sent again by go-redis, so that only its cost keeps asynq's loop from spinning.
func TestWorldSurvivesARefusedQueue(t *testing.T) {
	virtual(t, func(t *testing.T, w *world) {
		h := w.host("h")
		var runs tally
		h.serve(asynq.Config{}, asynq.HandlerFunc(func(context.Context, *asynq.Task) error {
			runs.start("work")()
			return nil
		}))
		h.queueLink.every("").refuse("NOAUTH Authentication required.")
		w.enqueue(asynq.NewTask("work", nil))
		h.queueLink.record()
		time.Sleep(time.Minute)
		if n := len(h.queueLink.sent("")); n == 0 || n > 60*200 {
			t.Errorf("%d commands in a minute", n)
		}
		if runs.count("work") != 0 {
			t.Error("ran")
		}
		h.queueLink.heal()
		w.until(10*time.Second, "task run", func() bool { return runs.count("work") == 1 })
	})
}

// Whatever state a test leaves its hosts in, the world ends.
func TestWorldEndsInAnyWeather(t *testing.T) {
	for name, weather := range map[string]func(*host){
		"cut":  (*host).cut,
		"hang": func(h *host) { h.lockLink.hang(); h.queueLink.hang() },
		"slow": func(h *host) { h.queueLink.slow(time.Second) },
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(t *testing.T, w *world) {
				h := w.host("h")
				h.serve(asynq.Config{}, asynq.HandlerFunc(func(context.Context, *asynq.Task) error {
					<-w.over
					return nil
				}))
				h.schedule("@every 1s", asynq.NewTask("work", nil))
				time.Sleep(5 * time.Second)
				weather(h)
				time.Sleep(20 * time.Second)
			}) // which fails if anything does not end
		})
	}
}

func TestTally(t *testing.T) {
	var runs tally
	var wg sync.WaitGroup
	for i := range 10 {
		wg.Go(func() {
			for range 10 {
				runs.start(fmt.Sprint(i))()
			}
		})
	}
	wg.Wait()
	if got := runs.overlaps(); len(got) != 0 {
		t.Errorf("one after the other, but: %q", got)
	}
	end := runs.start("k")
	runs.start("k")()
	if n := runs.running("k"); n != 1 {
		t.Errorf("%d running, want 1", n)
	}
	end()
	if got, n := runs.overlaps(), runs.count("k"); len(got) != 1 || n != 2 || runs.running("k") != 0 {
		t.Errorf("%d runs of k, overlaps %q", n, got)
	}
}

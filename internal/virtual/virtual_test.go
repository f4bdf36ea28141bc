package virtual

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
	Run(t, func(t *testing.T, w *World) {
		var runs Tally
		for i := range 3 {
			w.Host(fmt.Sprintf("h%d", i)).Serve(asynq.Config{}, asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
				defer runs.Start(string(task.Payload()))()
				return Busy(ctx, 5*time.Second)
			}))
		}
		var infos []*asynq.TaskInfo
		for i := range 20 {
			infos = append(infos, w.Enqueue(asynq.NewTask("work", fmt.Append(nil, i))))
		}
		w.Until(30*time.Second, "all tasks done", func() bool { return w.Drained() })
		for i, info := range infos {
			if n := runs.Count(fmt.Sprint(i)); n != 1 {
				t.Errorf("task %d ran %d times, want 1", i, n)
			}
			if s := w.State(info); s != "gone" {
				t.Errorf("task %d is %s, want gone", i, s)
			}
		}
		if s := w.Stats("default"); s.Processed != 20 || s.Failed != 0 {
			t.Errorf("processed %d, failed %d; want 20, 0", s.Processed, s.Failed)
		}
		if took := w.Elapsed(); took > 20*time.Second {
			t.Errorf("20 tasks of 5 s in 30 slots took %s", took)
		}
	})
}

func TestWorldRunsSchedulers(t *testing.T) {
	Run(t, func(t *testing.T, w *World) {
		var runs Tally
		h := w.Host("h")
		h.Serve(asynq.Config{TaskCheckInterval: time.Minute, DelayedTaskCheckInterval: time.Minute},
			asynq.HandlerFunc(func(context.Context, *asynq.Task) error {
				runs.Start("hourly")()
				return nil
			}))
		h.Schedule("@hourly", asynq.NewTask("report", nil))
		time.Sleep(2*time.Hour + 2*time.Minute)
		got := runs.Of("hourly")
		if len(got) != 2 {
			t.Fatalf("ran %d times in two hours, want 2", len(got))
		}
		for i, r := range got {
			due := w.Began.Add(time.Duration(i+1) * time.Hour)
			if late := r.Start.Sub(due); late < 0 || late > 2*time.Minute {
				t.Errorf("run %d came %s after the hour", i, late)
			}
		}
	})
}

func TestWorldRedeliversWhenALeaseExpires(t *testing.T) {
	Run(t, func(t *testing.T, w *World) {
		var runs Tally
		handler := func(h *Host) asynq.HandlerFunc {
			return func(context.Context, *asynq.Task) error {
				defer runs.Start("on " + h.Name)()
				if h.Name == "lost" {
					w.Deaf(time.Hour)
				}
				return nil
			}
		}
		lost, other := w.Host("lost"), w.Host("other")
		lost.Serve(asynq.Config{}, handler(lost))
		info := w.Enqueue(asynq.NewTask("work", nil), asynq.MaxRetry(5), asynq.Timeout(time.Hour))
		w.Until(5*time.Second, "task running", func() bool { return runs.Running("on lost") == 1 })
		lost.QueueLink.Cut()
		other.Serve(asynq.Config{RetryDelayFunc: func(int, error, *asynq.Task) time.Duration { return time.Second }}, handler(other))

		w.Until(3*time.Minute, "task run by the other host", func() bool { return runs.Count("on other") == 1 })
		w.Until(time.Minute, "task gone", func() bool { return w.State(info) == "gone" })
		if took := w.Elapsed(); took < time.Minute {
			t.Errorf("redelivered after %s; asynq waits for the lease and 30 s more", took)
		}
		if w.Task(info) != nil {
			t.Error("the inspector still knows the task")
		}
		if runs.Running("on lost") != 1 {
			t.Error("the deaf handler should still be running: nothing ended it")
		}
		if !w.Logged("lost asynq error Failed to extend lease") && !w.Logged("lost asynq error Failed to write server state") {
			t.Error("the cut host's heartbeat did not complain")
		}
	})
}

func TestWorldRequeuesOnShutdown(t *testing.T) {
	Run(t, func(t *testing.T, w *World) {
		var runs Tally
		srv := w.Host("first").Serve(asynq.Config{ShutdownTimeout: time.Second},
			asynq.HandlerFunc(func(context.Context, *asynq.Task) error {
				defer runs.Start("work")()
				w.Deaf(time.Minute)
				return nil
			}))
		info := w.Enqueue(asynq.NewTask("work", nil))
		w.Until(5*time.Second, "task running", func() bool { return runs.Running("work") == 1 })
		srv.Shutdown()
		if s := w.State(info); s != "pending" || w.Task(info).Retried != 0 {
			t.Fatalf("after shutdown the task is %s, want pending and no retry counted", s)
		}
		w.Host("second").Serve(asynq.Config{}, asynq.HandlerFunc(func(context.Context, *asynq.Task) error {
			defer runs.Start("work")()
			return nil
		}))
		w.Until(5*time.Second, "task gone", func() bool { return w.State(info) == "gone" })
		if got := runs.Overlaps(); len(got) != 1 {
			t.Errorf("without a lock the two runs overlap once; tally says %q", got)
		}
	})
}

func TestWorldExpiresKeysExactly(t *testing.T) {
	Run(t, func(t *testing.T, w *World) {
		time.Sleep(13 * time.Millisecond)
		w.RDB.Set(t.Context(), "k", "v", time.Second)
		time.Sleep(999 * time.Millisecond)
		if ttl := w.Redis.TTL("k"); ttl != time.Millisecond {
			t.Errorf("TTL after 999 ms is %s, want 1ms", ttl)
		}
		time.Sleep(2 * time.Millisecond)
		if w.Redis.Exists("k") {
			t.Error("the key outlived its TTL")
		}
	})
}

// setNX is the command that most of this is about.
func setNX(ctx context.Context, h *Host, value string) (string, error) {
	return h.RDB.SetArgs(ctx, "k", value, redis.SetArgs{Mode: "NX", Get: true, TTL: time.Minute}).Result()
}

func TestLinkLosesReplies(t *testing.T) {
	const timeout = 3 * time.Second // the client's
	for name, test := range map[string]struct {
		fault    func(*Fault) *Fault
		applied  bool // the first time
		min, max time.Duration
	}{
		"request, connection breaks": {(*Fault).LoseRequest, false, 0, time.Second},
		"request, silence":           {(*Fault).SwallowRequest, false, timeout, timeout + time.Second},
		"reply, connection breaks":   {(*Fault).LoseReply, true, 0, time.Second},
		"reply, silence":             {(*Fault).SwallowReply, true, timeout, timeout + time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			Run(t, func(t *testing.T, w *World) {
				h := w.Host("h")
				f := test.fault(h.LockLink.Next("SET", "k"))
				var seen string // by Redis, before go-redis sends the command again
				h.LockLink.Next("SET", "k").Before(func() { seen, _ = w.Redis.Get("k") })
				was, err := setNX(t.Context(), h, "mine")
				if test.applied && (err != nil || was != "mine" || seen != "mine") {
					t.Errorf("the command sent again found %q (%v), Redis had %q; want our own value", was, err, seen)
				}
				if !test.applied && (!errors.Is(err, redis.Nil) || seen != "") {
					t.Errorf("the command sent again found %q (%v), Redis had %q; want nothing", was, err, seen)
				}
				if took := w.Elapsed(); took < test.min || took > test.max {
					t.Errorf("took %s, want %s to %s", took, test.min, test.max)
				}
				if n := len(h.LockLink.Sent("SET", "k")); n != 2 || f.Hits() != 1 {
					t.Errorf("%d commands, %d hit; want 2, 1", n, f.Hits())
				}
				if v, _ := w.Redis.Get("k"); v != "mine" {
					t.Errorf("key is %q", v)
				}
			})
		})
	}
}

func TestLinkCuts(t *testing.T) {
	Run(t, func(t *testing.T, w *World) {
		h := w.Host("h")
		if _, err := setNX(t.Context(), h, "a"); !errors.Is(err, redis.Nil) {
			t.Fatal(err)
		}
		h.LockLink.Cut()
		_, err := setNX(t.Context(), h, "b")
		if !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("error is %v, want connection refused", err)
		}
		if err := h.queue.Ping(t.Context()).Err(); err != nil {
			t.Errorf("the other link is cut as well: %v", err)
		}
		h.LockLink.Heal()
		if was, err := setNX(t.Context(), h, "c"); err != nil || was != "a" {
			t.Errorf("after heal: %q, %v", was, err)
		}
	})
}

func TestLinkCutWhileARequestIsUnderWay(t *testing.T) {
	Run(t, func(t *testing.T, w *World) {
		h := w.Host("h")
		h.LockLink.Next("SET").Delay(2 * time.Second)
		w.Spawn(func() {
			time.Sleep(time.Second)
			h.LockLink.Cut()
		})
		if _, err := setNX(t.Context(), h, "a"); err == nil || errors.Is(err, redis.Nil) {
			t.Errorf("error is %v", err)
		}
		time.Sleep(5 * time.Second)
		if w.Redis.Exists("k") {
			t.Error("a request got over a cut link")
		}
	})
}

func TestLinkHangs(t *testing.T) {
	Run(t, func(t *testing.T, w *World) {
		h := w.Host("h", func(o *redis.Options) { o.ReadTimeout, o.MaxRetries = time.Second, 1 })
		h.RDB.Ping(t.Context())
		h.LockLink.Hang()
		start := time.Now()
		_, err := setNX(t.Context(), h, "a")
		if netErr := net.Error(nil); !errors.As(err, &netErr) || !netErr.Timeout() {
			t.Errorf("error is %v, want a timeout", err)
		}
		if took := time.Since(start); took < 2*time.Second || took > 3*time.Second {
			t.Errorf("took %s, want twice the read timeout", took)
		}
		if w.Redis.Exists("k") {
			t.Error("the request arrived")
		}
		h.LockLink.Heal()
		if _, err := setNX(t.Context(), h, "a"); !errors.Is(err, redis.Nil) {
			t.Errorf("after heal: %v", err)
		}
	})
}

func TestLinkHangsForClientsWithoutTimeout(t *testing.T) {
	Run(t, func(t *testing.T, w *World) {
		h := w.Host("h", func(o *redis.Options) { o.ReadTimeout, o.MaxRetries = -1, -1 })
		h.RDB.Ping(t.Context())
		h.LockLink.Hang()
		w.Spawn(func() {
			time.Sleep(time.Hour)
			h.LockLink.Heal()
		})
		if _, err := setNX(t.Context(), h, "a"); !errors.Is(err, io.EOF) {
			t.Errorf("error is %v, want a broken connection", err)
		}
		if took := w.Elapsed(); took != time.Hour {
			t.Errorf("took %s, want an hour", took)
		}
	})
}

func TestLinkDelays(t *testing.T) {
	Run(t, func(t *testing.T, w *World) {
		h := w.Host("h")
		h.LockLink.Next("SET").Delay(time.Second)
		h.LockLink.Next("SET").DelayReply(time.Second)
		for _, ttl := range []time.Duration{time.Minute, 59 * time.Second} {
			start := time.Now()
			if _, err := setNX(t.Context(), h, "a"); !errors.Is(err, redis.Nil) {
				t.Fatal(err)
			}
			if took := time.Since(start); took != time.Second {
				t.Errorf("took %s, want 1s", took)
			}
			if left := w.Redis.TTL("k"); left != ttl {
				t.Errorf("TTL is %s, want %s: a delayed request starts it late, a delayed reply does not", left, ttl)
			}
			w.Redis.Del("k")
		}
		h.LockLink.Slow(100 * time.Millisecond)
		start := time.Now()
		h.RDB.Get(t.Context(), "k")
		if took := time.Since(start); took != 100*time.Millisecond {
			t.Errorf("took %s on a slow link, want 100ms", took)
		}
	})
}

func TestLinkDeliversLateWhatTheClientGaveUp(t *testing.T) {
	Run(t, func(t *testing.T, w *World) {
		h := w.Host("h", func(o *redis.Options) { o.MaxRetries = -1 })
		h.LockLink.Next("SET").Delay(10 * time.Second)
		if err := h.RDB.Set(t.Context(), "k", "late", 0).Err(); err == nil || w.Elapsed() > 4*time.Second {
			t.Errorf("%v after %s, want a timeout of 3s", err, w.Elapsed())
		}
		if w.Redis.Exists("k") {
			t.Error("it arrived at once")
		}
		time.Sleep(8 * time.Second)
		if v, _ := w.Redis.Get("k"); v != "late" {
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
			Run(t, func(t *testing.T, w *World) {
				h := w.Host("h")
				f := h.LockLink.Every("SET").Refuse(test.text)
				if _, err := setNX(t.Context(), h, "a"); err == nil || err.Error() != test.text {
					t.Errorf("error is %v", err)
				}
				if n := len(h.LockLink.Sent("SET")); n != test.sent || f.Hits() != n {
					t.Errorf("sent %d times, want %d", n, test.sent)
				}
				f.Lift()
				if _, err := setNX(t.Context(), h, "a"); !errors.Is(err, redis.Nil) {
					t.Errorf("after lift: %v", err)
				}
			})
		})
	}
}

func TestLinkRunsAHookAroundACommand(t *testing.T) {
	Run(t, func(t *testing.T, w *World) {
		h := w.Host("h")
		script := redis.NewScript(`return redis.call("GET", KEYS[1])`)
		h.LockLink.Next(script.Hash(), "k").Before(func() { w.Redis.Set("k", "before") })
		h.LockLink.Next("EVAL", "k").After(func() { w.Redis.Set("k", "after") })
		v, err := script.Run(t.Context(), h.RDB, []string{"k"}).Text()
		if err != nil || v != "before" {
			t.Errorf("script says %q, %v", v, err)
		}
		if v, _ := w.Redis.Get("k"); v != "after" {
			t.Errorf("key is %q", v)
		}
		// Sent by its hash first, which Redis did not know, and then by its text: one script, two commands.
		if n := len(h.LockLink.Sent(script.Hash(), "k")); n != 2 {
			t.Errorf("%d commands of the script, want 2", n)
		}
		if n := len(h.LockLink.Sent("", "other")); n != 0 {
			t.Errorf("%d commands about another key", n)
		}
		h.LockLink.Forget()
		if n := len(h.LockLink.Sent("")); n != 0 {
			t.Errorf("%d commands after forget", n)
		}
	})
}

func TestLinkCarriesPipelinesAndLargeValues(t *testing.T) {
	Run(t, func(t *testing.T, w *World) {
		h := w.Host("h")
		large := strings.Repeat("x", 1<<20)
		var get *redis.StringCmd
		_, err := h.RDB.TxPipelined(t.Context(), func(p redis.Pipeliner) error {
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
	for name, trouble := range map[string]func(*Link){"cut": (*Link).Cut, "hang": (*Link).Hang} {
		t.Run(name, func(t *testing.T) {
			Run(t, func(t *testing.T, w *World) {
				h := w.Host("h")
				ended := make(chan error, 1)
				h.Serve(asynq.Config{}, asynq.HandlerFunc(func(ctx context.Context, _ *asynq.Task) error {
					ended <- Busy(ctx, time.Hour)
					return nil
				}))
				time.Sleep(time.Second)
				trouble(h.QueueLink)
				time.Sleep(2 * time.Minute)
				h.QueueLink.Heal()
				time.Sleep(10 * time.Second) // resubscribed by then

				info := w.Enqueue(asynq.NewTask("work", nil))
				w.Until(10*time.Second, "task running", func() bool { return w.State(info) == "active" })
				if err := w.Inspector.CancelProcessing(info.ID); err != nil {
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
	Run(t, func(t *testing.T, w *World) {
		h := w.Host("h")
		var runs Tally
		h.Serve(asynq.Config{}, asynq.HandlerFunc(func(context.Context, *asynq.Task) error {
			runs.Start("work")()
			return nil
		}))
		h.QueueLink.Every("").Refuse("NOAUTH Authentication required.")
		w.Enqueue(asynq.NewTask("work", nil))
		h.QueueLink.Record()
		time.Sleep(time.Minute)
		if n := len(h.QueueLink.Sent("")); n == 0 || n > 60*200 {
			t.Errorf("%d commands in a minute", n)
		}
		if runs.Count("work") != 0 {
			t.Error("ran")
		}
		h.QueueLink.Heal()
		w.Until(10*time.Second, "task run", func() bool { return runs.Count("work") == 1 })
	})
}

// Whatever state a test leaves its hosts in, the world ends.
func TestWorldEndsInAnyWeather(t *testing.T) {
	for name, weather := range map[string]func(*Host){
		"cut":  (*Host).Cut,
		"hang": func(h *Host) { h.LockLink.Hang(); h.QueueLink.Hang() },
		"slow": func(h *Host) { h.QueueLink.Slow(time.Second) },
	} {
		t.Run(name, func(t *testing.T) {
			Run(t, func(t *testing.T, w *World) {
				h := w.Host("h")
				h.Serve(asynq.Config{}, asynq.HandlerFunc(func(context.Context, *asynq.Task) error {
					<-w.Over
					return nil
				}))
				h.Schedule("@every 1s", asynq.NewTask("work", nil))
				time.Sleep(5 * time.Second)
				weather(h)
				time.Sleep(20 * time.Second)
			}) // which fails if anything does not end
		})
	}
}

func TestTally(t *testing.T) {
	var runs Tally
	var wg sync.WaitGroup
	for i := range 10 {
		wg.Go(func() {
			for range 10 {
				runs.Start(fmt.Sprint(i))()
			}
		})
	}
	wg.Wait()
	if got := runs.Overlaps(); len(got) != 0 {
		t.Errorf("one after the other, but: %q", got)
	}
	end := runs.Start("k")
	runs.Start("k")()
	if n := runs.Running("k"); n != 1 {
		t.Errorf("%d running, want 1", n)
	}
	end()
	if got, n := runs.Overlaps(), runs.Count("k"); len(got) != 1 || n != 2 || runs.Running("k") != 0 {
		t.Errorf("%d runs of k, overlaps %q", n, got)
	}
}

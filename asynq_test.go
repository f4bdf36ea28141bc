package redislock

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"example.com/redislock/internal/virtual"
	"github.com/hibiken/asynq"
)

var errBenign = errors.New("nothing to print")

// userFuncs are a user's own functions in asynq's configuration, which keep what they are asked.
type userFuncs struct {
	mu        sync.Mutex
	isFailure []error
	delays    []string // retries so far, and the error
	handled   []error
}

func (u *userFuncs) config() asynq.Config {
	return asynq.Config{
		IsFailure: func(err error) bool {
			u.mu.Lock()
			defer u.mu.Unlock()
			u.isFailure = append(u.isFailure, err)
			return !errors.Is(err, errBenign)
		},
		RetryDelayFunc: func(n int, err error, task *asynq.Task) time.Duration {
			u.mu.Lock()
			defer u.mu.Unlock()
			u.delays = append(u.delays, fmt.Sprintf("%s %d: %v", task.Type(), n, err))
			return 3 * time.Second
		},
		ErrorHandler: asynq.ErrorHandlerFunc(func(_ context.Context, _ *asynq.Task, err error) {
			u.mu.Lock()
			defer u.mu.Unlock()
			u.handled = append(u.handled, err)
		}),
	}
}

// calls says how often each was asked.
func (u *userFuncs) calls() [3]int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return [3]int{len(u.isFailure), len(u.delays), len(u.handled)}
}

func TestServerConfigLeavesOrdinaryErrorsToTheUsersOwnFunctions(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var (
			user userFuncs
			b    books
			runs virtual.Tally
			h    = w.Host("h")
		)
		h.Serve(ServerConfig(user.config()), locker(h, &b).Middleware(asynq.HandlerFunc(func(context.Context, *asynq.Task) error {
			runs.Start("print")()
			switch runs.Count("print") {
			case 1, 2:
				return errBenign
			case 3, 4:
				return errPrinter
			}
			return nil
		})))
		info := w.Enqueue(asynq.NewTask("print", nil), asynq.MaxRetry(3))
		w.Until(time.Minute, "task done", func() bool { return w.State(info) == "gone" })
		if got := user.calls(); got != [3]int{4, 4, 4} {
			t.Errorf("IsFailure, RetryDelayFunc and ErrorHandler were asked %v times, want 4 each", got)
		}
		want := []string{
			"print 0: nothing to print", "print 0: nothing to print",
			"print 0: the printer is out of paper", "print 1: the printer is out of paper",
		}
		if !reflect.DeepEqual(user.delays, want) {
			t.Errorf("RetryDelayFunc was asked %q, want %q", user.delays, want)
		}
		for i, err := range user.handled {
			if wantErr := []error{errBenign, errBenign, errPrinter, errPrinter}[i]; err != wantErr || user.isFailure[i] != wantErr {
				t.Errorf("error %d is %v and %v, want the handler's own: %v", i, err, user.isFailure[i], wantErr)
			}
		}
		got := runs.Of("print")
		for i := 1; i < len(got); i++ { // asynq keeps whole seconds and looks for retries once a second
			if gap := got[i].Start.Sub(got[i-1].End); gap < 2*time.Second || gap > 5*time.Second {
				t.Errorf("run %d came %s after the one before, want the user's 3 s", i, gap)
			}
		}
		if failed := w.Stats("default").Failed; failed != 2 {
			t.Errorf("asynq counted %d failures, want 2: the benign ones are none", failed)
		}
	})
}

func TestContentionReachesNoneOfTheUsersFunctions(t *testing.T) {
	for name, c := range map[string]struct {
		policy  Policy
		trouble func(w *virtual.World, h *virtual.Host, key string)
	}{
		"held, Retry": {Retry(time.Second), func(w *virtual.World, _ *virtual.Host, key string) { _ = w.Redis.Set(key, heldByOther) }},
		"held, Wait":  {Wait(300 * time.Millisecond), func(w *virtual.World, _ *virtual.Host, key string) { _ = w.Redis.Set(key, heldByOther) }},
		"held, PolicyFunc": {deciding(func(held *HeldError) error { return fmt.Errorf("busy: %w", held) }),
			func(w *virtual.World, _ *virtual.Host, key string) { _ = w.Redis.Set(key, heldByOther) }},
		"a holder that cannot be read": {Skip(), func(w *virtual.World, _ *virtual.Host, key string) { _ = w.Redis.Set(key, "redislock/2 ?") }},
		"Redis unreachable":            {Skip(), func(_ *virtual.World, h *virtual.Host, _ string) { h.LockLink.Cut() }},
	} {
		t.Run(name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var (
					user userFuncs
					b    books
					runs virtual.Tally
					h    = w.Host("h")
					l    = locker(h, &b, WithTTL(2*time.Second), WithPolicy(c.policy))
					task = job("work", 0)
				)
				lockName, _ := l.Name(t.Context(), task)
				key, _ := l.redisKey(lockName)
				c.trouble(w, h, key)
				// A middleware of the user's own, further out, that dresses up errors.
				dressing := func(next asynq.Handler) asynq.Handler {
					return asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
						if err := next.ProcessTask(ctx, task); err != nil {
							return fmt.Errorf("%s: %w", task.Type(), err)
						}
						return nil
					})
				}
				h.Serve(ServerConfig(user.config()), dressing(l.Middleware(working(&runs))))
				info := w.Enqueue(task, asynq.MaxRetry(1))
				w.Until(5*time.Minute, "ten contentions", func() bool { return b.count(EventRequeued) >= 10 })
				w.Untouched(info)
				if got := user.calls(); got != [3]int{} {
					t.Errorf("IsFailure, RetryDelayFunc and ErrorHandler were asked %v times: %v", got, user.handled)
				}
				if runs.Count("work") != 0 {
					t.Error("the task ran")
				}
				h.LockLink.Heal()
				w.Redis.Del(key)
				w.Until(20*time.Second, "task done", func() bool { return w.State(info) == "gone" })
				if runs.Count("work") != 1 {
					t.Errorf("%d runs in the end, want 1", runs.Count("work"))
				}
				b.balance(t, 1+b.count(EventRequeued))
			})
		})
	}
}

// heldByOther is at a key that somebody on another machine holds.
var heldByOther = encodeValue(Holder{TaskID: "other", TaskType: "work", Queue: "default", Host: "elsewhere", PID: 7}, "token")

func TestTheErrorHandlerHearsOfContentionThatEndsInTheArchive(t *testing.T) {
	for name, c := range map[string]struct {
		policy Policy
		retry  int
		value  string
		want   []error
	}{
		"Archive":                        {Archive(), 3, heldByOther, []error{ErrHeld, asynq.SkipRetry}},
		"PolicyFunc with SkipRetry":      {deciding(func(held *HeldError) error { return fmt.Errorf("%w: %w", held, asynq.SkipRetry) }), 3, heldByOther, []error{ErrHeld, asynq.SkipRetry}},
		"MaxRetry(0), Retry":             {Retry(time.Second), 0, heldByOther, []error{ErrHeld}},
		"MaxRetry(0), Wait":              {Wait(time.Second), 0, heldByOther, []error{ErrHeld}},
		"MaxRetry(0), holder unreadable": {Skip(), 0, "redislock/2 ?", []error{ErrHeld}},
	} {
		t.Run(name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var (
					user userFuncs
					b    books
					h    = w.Host("h")
					l    = locker(h, &b, WithPolicy(c.policy))
					task = job("work", 0)
				)
				lockName, _ := l.Name(t.Context(), task)
				key, _ := l.redisKey(lockName)
				_ = w.Redis.Set(key, c.value)
				h.Serve(ServerConfig(user.config()), l.Middleware(asynq.NotFoundHandler()))
				info := w.Enqueue(task, asynq.MaxRetry(c.retry), asynq.Timeout(20*time.Second))
				w.Until(30*time.Second, "task archived", func() bool { return w.State(info) == "archived" })
				if got := user.calls(); got != [3]int{0, 0, 1} {
					t.Fatalf("IsFailure, RetryDelayFunc and ErrorHandler were asked %v times, want the last alone, once", got)
				}
				for _, want := range c.want {
					if !errors.Is(user.handled[0], want) {
						t.Errorf("the ErrorHandler was told %v, want %v", user.handled[0], want)
					}
				}
				if !strings.Contains(user.handled[0].Error(), key) {
					t.Errorf("%v does not name the key", user.handled[0])
				}
				if b.count(EventArchived) != 1 {
					t.Errorf("events: %s", &b)
				}
				b.balance(t, 1)
			})
		})
	}
}

func TestServerConfigKeepsAsynqsDefaults(t *testing.T) {
	cfg := ServerConfig(asynq.Config{})
	if cfg.ErrorHandler != nil {
		t.Error("an ErrorHandler out of nothing")
	}
	if !cfg.IsFailure(errPrinter) || cfg.IsFailure(nil) {
		t.Error("IsFailure is not asynq's default: every error")
	}
	for range 100 { // asynq's: 15 s and up to 30 s more, growing with the fourth power of the retries
		for n, low := range map[int]time.Duration{0: 15 * time.Second, 3: (81 + 15) * time.Second} {
			d := cfg.RetryDelayFunc(n, errPrinter, job("work", 0))
			if high := low + 30*time.Duration(n+1)*time.Second; d < low || d > high {
				t.Errorf("retry %d comes after %s, want %s to %s", n, d, low, high)
			}
		}
	}
	if d := contended(nil, ErrHeld, 5*time.Second); cfg.IsFailure(d) || cfg.RetryDelayFunc(3, d, nil) != 5*time.Second {
		t.Error("contention is not recognised without functions of the user's own")
	}
}

func TestServerConfigTouchesNothingElse(t *testing.T) {
	cfg := asynq.Config{
		Concurrency: 3, TaskCheckInterval: 4, Queues: map[string]int{"a": 5}, StrictPriority: true, Logger: virtual.HostLog{}, LogLevel: asynq.WarnLevel,
		ShutdownTimeout: 6, HealthCheckInterval: 7, DelayedTaskCheckInterval: 8, GroupGracePeriod: 9, GroupMaxDelay: 10, GroupMaxSize: 11,
		GroupAggregator: asynq.GroupAggregatorFunc(nil), JanitorInterval: 12, JanitorBatchSize: 13,
		BaseContext: context.Background, HealthCheckFunc: func(error) {},
	}
	ours := map[string]bool{"IsFailure": true, "RetryDelayFunc": true, "ErrorHandler": true}
	before, after := reflect.ValueOf(cfg), reflect.ValueOf(ServerConfig(cfg))
	for i := range before.NumField() {
		field := before.Type().Field(i).Name
		if ours[field] {
			continue
		}
		if before.Field(i).IsZero() {
			t.Errorf("this test does not set %s", field)
		}
		if same(before.Field(i), after.Field(i)) {
			continue
		}
		t.Errorf("%s was changed", field)
	}
	if cfg.IsFailure != nil || cfg.RetryDelayFunc != nil {
		t.Error("the caller's own configuration was changed")
	}
}

// same compares functions too, by where they are.
func same(a, b reflect.Value) bool {
	if a.Kind() == reflect.Func {
		return a.Pointer() == b.Pointer()
	}
	return reflect.DeepEqual(a.Interface(), b.Interface())
}

func TestServerConfigMayBeAppliedTwice(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var user userFuncs
		var b books
		h := w.Host("h")
		l := locker(h, &b, WithPolicy(Retry(time.Second)))
		task := job("work", 0)
		lockName, _ := l.Name(t.Context(), task)
		key, _ := l.redisKey(lockName)
		_ = w.Redis.Set(key, heldByOther)
		h.Serve(ServerConfig(ServerConfig(user.config())), l.Middleware(asynq.HandlerFunc(func(context.Context, *asynq.Task) error { return errPrinter })))
		info := w.Enqueue(task, asynq.MaxRetry(1))
		w.Until(time.Minute, "5 contentions", func() bool { return b.count(EventRequeued) >= 5 })
		w.Untouched(info)
		w.Redis.Del(key)
		w.Until(time.Minute, "task archived", func() bool { return w.State(info) == "archived" })
		if got := user.calls(); got != [3]int{1, 1, 2} {
			t.Errorf("IsFailure, RetryDelayFunc and ErrorHandler were asked %v times, want 1, 1, 2", got)
		}
	})
}

// What the documentation says of a server without ServerConfig: everything works, but each contention costs a retry, and
// on the last attempt the task stays until it has its lock.
func TestWithoutServerConfigEachContentionCostsARetry(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var (
			user userFuncs
			b    books
			runs virtual.Tally
			h    = w.Host("h")
		)
		h.Serve(user.config(), locker(h, &b, WithPolicy(Retry(time.Second))).Middleware(working(&runs)))
		w.Enqueue(job("work", 20*time.Second))
		w.Until(5*time.Second, "holder running", func() bool { return runs.Running("work") == 1 })
		rival := w.Enqueue(job("work", 20*time.Second), asynq.MaxRetry(3))
		w.Until(30*time.Second, "three contentions", func() bool { return b.count(EventRequeued) == 3 })
		w.Until(10*time.Second, "last attempt", func() bool { return w.State(rival) == "active" })
		if now := w.Task(rival); now.Retried != 3 || !strings.Contains(now.LastErr, "held by task") {
			t.Errorf("Retried is %d with %q, want 3", now.Retried, now.LastErr)
		}
		if got := user.calls(); got != [3]int{3, 3, 3} {
			t.Errorf("IsFailure, RetryDelayFunc and ErrorHandler were asked %v times, want 3 each", got)
		}
		for _, err := range user.handled {
			if !errors.Is(err, ErrHeld) {
				t.Errorf("reported %v, want ErrHeld", err)
			}
		}
		if failed := w.Stats("default").Failed; failed != 3 {
			t.Errorf("asynq counted %d failures, want 3", failed)
		}
		w.Until(3*time.Minute, "both done", func() bool { return w.Drained() })
		if s := w.State(rival); s != "gone" || runs.Count("work") != 2 || len(runs.Overlaps()) != 0 {
			t.Errorf("the rival is %s after %d runs, overlaps %v; want it run on its last attempt", s, runs.Count("work"), runs.Overlaps())
		}
		b.balance(t, 2+3)
	})
}

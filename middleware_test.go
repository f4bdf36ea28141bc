package redislock

import (
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode"

	"example.com/redislock/internal/virtual"
	"github.com/hibiken/asynq"
)

// complaints is an asynq.ErrorHandler that keeps what it is told. The zero value is ready.
type complaints struct {
	mu   sync.Mutex
	errs []error
}

func (c *complaints) HandleError(_ context.Context, _ *asynq.Task, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.errs = append(c.errs, err)
}

func (c *complaints) all() []error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.errs)
}

// everySecond is the retry delay of ordinary failures in these tests: told apart from that of a lock, which is longer.
func everySecond(int, error, *asynq.Task) time.Duration { return time.Second }

// lockKeys returns the keys in Redis that are not asynq's own.
func lockKeys(w *virtual.World) []string {
	return slices.DeleteFunc(w.Redis.Keys(), func(key string) bool { return strings.HasPrefix(key, "asynq:") })
}

// --- What a handler ends with ---

var errPrinter = errors.New("the printer is out of paper")

// waysToEnd are the ways in which a handler can end.
var waysToEnd = []struct {
	name    string
	end     func() error
	outcome error // in the event
}{
	{"nil", func() error { return nil }, nil},
	{"error", func() error { return errPrinter }, errPrinter},
	{"SkipRetry", func() error { return fmt.Errorf("give up: %w", asynq.SkipRetry) }, asynq.SkipRetry},
	{"RevokeTask", func() error { return fmt.Errorf("never mind: %w", asynq.RevokeTask) }, asynq.RevokeTask},
	{"panic", func() error { panic("paper jam") }, errUnfinished},
	{"panic with an error", func() error { panic(errPrinter) }, errUnfinished},
	{"panic of the runtime", func() error { var none []error; return none[len(none)] }, errUnfinished},
	{"Goexit", func() error { runtime.Goexit(); return nil }, errUnfinished},
}

// fate is what asynq made of a task.
type fate struct {
	state, lastErr, reported string
	retried, failed          int
}

func fateOf(w *virtual.World, h *virtual.Host, handler asynq.Handler) fate {
	var told complaints
	h.Serve(ServerConfig(asynq.Config{
		ErrorHandler:   &told,
		RetryDelayFunc: func(int, error, *asynq.Task) time.Duration { return time.Hour },
	}), handler)
	info := w.Enqueue(asynq.NewTask("print", nil), asynq.MaxRetry(3), asynq.Timeout(10*time.Second))
	w.Until(20*time.Second, "task out of the worker", func() bool { s := w.State(info); return s != "pending" && s != "active" })
	f := fate{state: w.State(info), reported: fmt.Sprint(told.all()), failed: w.Stats("default").Failed}
	if now := w.Task(info); now != nil {
		f.lastErr, f.retried = now.LastErr, now.Retried
	}
	return f
}

func TestWhateverAHandlerEndsWithReachesAsynqUnchangedAndFreesTheLock(t *testing.T) {
	for _, c := range waysToEnd {
		t.Run(c.name, func(t *testing.T) {
			handler := asynq.HandlerFunc(func(context.Context, *asynq.Task) error { return c.end() })
			var bare, locked fate
			virtual.Run(t, func(_ *testing.T, w *virtual.World) { bare = fateOf(w, w.Host("h"), handler) })
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				h := w.Host("h")
				l := locker(h, &b)
				locked = fateOf(w, h, l.Middleware(handler))

				acquired, released := b.of(EventAcquired), b.of(EventReleased)
				if len(acquired) != 1 || len(released) != 1 || released[0].Err != nil {
					t.Fatalf("lock not taken and freed once: %s", &b)
				}
				if released[0].Held != 0 {
					t.Errorf("the lock was held for %s by a handler that ended at once", released[0].Held)
				}
				if keys := lockKeys(w); len(keys) != 0 {
					t.Errorf("keys left: %q", keys)
				}
				if ran := b.of(EventRan); len(ran) != 1 || !errors.Is(ran[0].Err, c.outcome) {
					t.Errorf("outcome is %+v, want %v", ran, c.outcome)
				}
				b.balance(t, 1)
			})
			if locked != bare {
				t.Errorf("under a lock the task ended as %+v\nwithout one as %+v", locked, bare)
			}
		})
	}
}

func TestOnlySuccessLeavesADoneMarker(t *testing.T) {
	for _, c := range waysToEnd {
		t.Run(c.name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				h := w.Host("h")
				l := locker(h, &b, WithDoneFor(time.Hour))
				fateOf(w, h, l.Middleware(asynq.HandlerFunc(func(context.Context, *asynq.Task) error { return c.end() })))
				name, _ := l.Name(t.Context(), asynq.NewTask("print", nil))
				holder, ok, err := l.Holder(t.Context(), name)
				if want := c.outcome == nil; ok != want || holder.Done != want || err != nil {
					t.Errorf("at the key is %v, %v (%v); want a done marker: %v", holder, ok, err, want)
				}
				b.balance(t, 1)
			})
		})
	}
}

func TestAPanicPassesThroughTheLockAsItIs(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		l := locker(w.Host("h"), &b)
		value := &struct{ why string }{"paper jam"}
		func() {
			defer func() {
				if p := recover(); p != any(value) {
					t.Errorf("recovered %v, want the very value that the handler panicked with", p)
				}
			}()
			_ = l.Middleware(asynq.HandlerFunc(func(context.Context, *asynq.Task) error { panic(value) })).
				ProcessTask(t.Context(), asynq.NewTask("print", nil))
			t.Error("the panic did not pass through")
		}()
		if keys := lockKeys(w); len(keys) != 0 {
			t.Errorf("keys left: %q", keys)
		}
		b.balance(t, 1)
	})
}

func TestALockIsReleasedThoughItsContextIsCancelled(t *testing.T) {
	for name, cancel := range map[string]func(*virtual.World, *asynq.Server, *asynq.TaskInfo){
		"by the inspector": func(w *virtual.World, _ *asynq.Server, info *asynq.TaskInfo) {
			if err := w.Inspector.CancelProcessing(info.ID); err != nil {
				w.T.Error(err)
			}
		},
		"by its timeout": func(*virtual.World, *asynq.Server, *asynq.TaskInfo) { time.Sleep(30 * time.Second) },
	} {
		t.Run(name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				h := w.Host("h")
				h.LockLink.Slow(10 * time.Millisecond)
				var returned time.Time
				srv := h.Serve(ServerConfig(asynq.Config{}), locker(h, &b).Middleware(asynq.HandlerFunc(
					func(ctx context.Context, _ *asynq.Task) error {
						defer func() { returned = time.Now() }()
						return virtual.Busy(ctx, time.Hour)
					})))
				info := w.Enqueue(asynq.NewTask("print", nil), asynq.Timeout(30*time.Second))
				w.Until(5*time.Second, "lock held", func() bool { return len(lockKeys(w)) == 1 })
				time.Sleep(time.Second) // until the server listens for cancelations
				cancel(w, srv, info)
				w.Until(5*time.Second, "lock released", func() bool { return b.count(EventReleased) == 1 })
				if e := b.of(EventReleased)[0]; e.Err != nil {
					t.Errorf("released with %v", e.Err)
				}
				if sent := h.LockLink.Sent(releaseScript.Hash()); len(sent) == 0 || sent[0].At.Sub(returned) > time.Millisecond {
					t.Errorf("the release was not sent when the handler returned: %v", sent)
				}
				if keys := lockKeys(w); len(keys) != 0 {
					t.Errorf("keys left: %q", keys)
				}
				b.balance(t, 1)
			})
		})
	}
}

func TestAFailingReleaseNeitherMasksTheResultNorHoldsItUp(t *testing.T) {
	for name, trouble := range map[string]func(*virtual.Link){
		"refused": (*virtual.Link).Cut,
		"silence": (*virtual.Link).Hang,
		"no permission": func(l *virtual.Link) {
			l.Every("").Refuse("NOPERM this user has no permissions to run the 'evalsha' command")
		},
		"read only": func(l *virtual.Link) { l.Every("").Refuse("READONLY You can't write against a read only replica.") },
	} {
		for _, result := range []error{nil, errPrinter} {
			for _, ttl := range []time.Duration{5 * time.Second, time.Minute} {
				t.Run(fmt.Sprintf("%s, %v, TTL %s", name, result, ttl), func(t *testing.T) {
					virtual.Run(t, func(t *testing.T, w *virtual.World) {
						var b books
						h := w.Host("h")
						var end time.Time
						err := locker(h, &b, WithTTL(ttl)).Middleware(asynq.HandlerFunc(func(context.Context, *asynq.Task) error {
							trouble(h.LockLink)
							end = time.Now()
							return result
						})).ProcessTask(t.Context(), asynq.NewTask("print", nil))
						if err != result {
							t.Errorf("result is %v, want %v", err, result)
						}
						if took, bound := time.Since(end), min(2*time.Second, ttl/10); took > bound {
							t.Errorf("the return took %s, want at most %s", took, bound)
						}
						w.Until(3*ttl, "key lapsed", func() bool { return len(lockKeys(w)) == 0 })
						w.Until(3*ttl, "lock booked", func() bool { return b.count(EventReleased) == 1 })
						if e := b.of(EventReleased)[0]; e.Err == nil {
							t.Error("the event does not say that the release is unconfirmed")
						}
						b.balance(t, 1)
					})
				})
			}
		}
	}
}

func TestAnErrorOfAHandlerWhoseLockWasLostMatchesBoth(t *testing.T) {
	for name, result := range map[string]error{"nil": nil, "error": errPrinter, "SkipRetry": asynq.SkipRetry} {
		t.Run(name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				h := w.Host("h")
				err := locker(h, &b).Middleware(asynq.HandlerFunc(func(ctx context.Context, _ *asynq.Task) error {
					w.Redis.Del(lockKeys(w)[0])
					<-ctx.Done()
					return result
				})).ProcessTask(t.Context(), asynq.NewTask("print", nil))
				if !errors.Is(err, result) || (result != nil) != errors.Is(err, ErrLost) {
					t.Errorf("result is %v; want %v, and ErrLost in it if it is an error", err, result)
				}
				time.Sleep(time.Millisecond) // a loss is told when the context has ended already
				b.balance(t, 1)
			})
		})
	}
}

// --- Keys, through the whole stack ---

func TestOneNameInTwoQueuesIsOneLockUnlessPerQueueTellsThemApart(t *testing.T) {
	keys := map[string]KeyFunc{
		"ByTypeAndPayload": ByTypeAndPayload,
		"ByType":           ByType,
		"ByTaskID":         ByTaskID,
		"ByJSON()":         ByJSON(),
		"ByJSON(day)":      ByJSON("day"),
		"ByHeader":         ByHeader("tenant"),
		"Shared":           Shared("reports", ByType),
		"own":              func(context.Context, *asynq.Task) (string, error) { return "reports", nil },
	}
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		var runs virtual.Tally
		h := w.Host("h")
		mux := asynq.NewServeMux()
		handler := asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
			defer runs.Start(task.Type())()
			return virtual.Busy(ctx, 3*time.Second)
		})
		for name, key := range keys {
			common, apart := name+", one lock", name+", PerQueue"
			mux.Handle(common, locker(h, &b, WithKey(key), WithKeyPrefix(common), WithTTL(2*time.Second)).Middleware(handler))
			mux.Handle(apart, locker(h, &b, WithKey(PerQueue(key)), WithKeyPrefix(apart)).Middleware(handler))
		}
		h.Serve(ServerConfig(asynq.Config{Concurrency: 50, Queues: map[string]int{"high": 1, "low": 1}}), mux)
		for name := range keys {
			for _, kind := range []string{name + ", one lock", name + ", PerQueue"} {
				task := asynq.NewTaskWithHeaders(kind, []byte(`{"day":1}`), map[string]string{"tenant": "acme"})
				for _, queue := range []string{"high", "low"} {
					w.Enqueue(task, asynq.Queue(queue), asynq.TaskID(kind))
				}
			}
		}
		w.Until(20*time.Second, "all done", func() bool { return w.Drained("high", "low") })
		for name := range keys {
			for _, kind := range []string{name + ", one lock", name + ", PerQueue"} {
				together := slices.ContainsFunc(runs.Overlaps(), func(s string) bool { return strings.HasPrefix(s, kind+":") })
				if want := strings.HasSuffix(kind, "PerQueue"); together != want || runs.Count(kind) != 2 {
					t.Errorf("%s: %d runs, together: %v; want 2, %v", kind, runs.Count(kind), together, want)
				}
			}
		}
		b.balance(t, 4*len(keys)+b.count(EventRequeued))
	})
}

func TestWhatAKeyFuncAnswersDecidesWhetherAndHowATaskFails(t *testing.T) {
	errLookup := errors.New("tenant lookup failed")
	for _, c := range []struct {
		name    string
		key     KeyFunc
		runs    int
		tries   int // until the archive
		lastErr string
		matches error
		kind    EventKind
	}{
		{"an error", func(context.Context, *asynq.Task) (string, error) { return "name", errLookup },
			0, 3, "tenant lookup failed", errLookup, EventRefused},
		{"an error with SkipRetry", func(context.Context, *asynq.Task) (string, error) {
			return "name", fmt.Errorf("%w: %w", errLookup, asynq.SkipRetry)
		}, 0, 1, "tenant lookup failed: skip retry for the task", asynq.SkipRetry, EventRefused},
		{"a panic", func(context.Context, *asynq.Task) (string, error) { panic("no such tenant") },
			0, 3, "no such tenant", nil, EventRefused},
		{"an empty name", func(context.Context, *asynq.Task) (string, error) { return "", nil },
			0, 3, ErrInvalidKey.Error(), ErrInvalidKey, EventRefused},
		{"an empty name in PerQueue", PerQueue(func(context.Context, *asynq.Task) (string, error) { return "", nil }),
			0, 3, ErrInvalidKey.Error(), ErrInvalidKey, EventRefused},
		{"an empty name in Shared", Shared("s", func(context.Context, *asynq.Task) (string, error) { return "", nil }),
			0, 3, ErrInvalidKey.Error(), ErrInvalidKey, EventRefused},
		{"a missing field", ByJSON("tenant"), 0, 3, `"tenant"`, ErrInvalidKey, EventRefused},
		{"a missing header", ByHeader("tenant"), 0, 3, `"tenant"`, ErrInvalidKey, EventRefused},
		{"NoLock", func(context.Context, *asynq.Task) (string, error) { return "", NoLock }, 2, 0, "", nil, EventPassed},
		{"NoLock with a name, wrapped", func(context.Context, *asynq.Task) (string, error) {
			return "name", fmt.Errorf("free for all: %w", NoLock)
		}, 2, 0, "", nil, EventPassed},
	} {
		t.Run(c.name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var (
					b    books
					runs virtual.Tally
					told complaints
					h    = w.Host("h")
				)
				h.Serve(ServerConfig(asynq.Config{RetryDelayFunc: everySecond, ErrorHandler: &told}),
					locker(h, &b, WithKey(c.key), WithFailOpen()).Middleware(asynq.HandlerFunc(func(ctx context.Context, _ *asynq.Task) error {
						defer runs.Start("work")()
						if _, ok := FromContext(ctx); ok {
							t.Error("ran with a lock")
						}
						return virtual.Busy(ctx, time.Second)
					})))
				tasks := []*asynq.TaskInfo{
					w.Enqueue(asynq.NewTask("work", []byte(`{}`)), asynq.MaxRetry(2)),
					w.Enqueue(asynq.NewTask("work", []byte(`{}`)), asynq.MaxRetry(2)),
				}
				w.Until(20*time.Second, "both settled", func() bool { return w.Settled(tasks[0]) && w.Settled(tasks[1]) })

				if n := runs.Count("work"); n != c.runs {
					t.Errorf("%d runs, want %d", n, c.runs)
				}
				if c.runs == 2 && len(runs.Overlaps()) != 1 {
					t.Error("two tasks without a lock did not run next to each other")
				}
				if n := b.count(c.kind); n != 2*max(c.tries, 1) {
					t.Errorf("events: %s", &b)
				}
				if got := told.all(); len(got) != 2*c.tries {
					t.Errorf("asynq's ErrorHandler was told %q, want %d errors", got, 2*c.tries)
				} else if c.matches != nil && !errors.Is(got[0], c.matches) {
					t.Errorf("the error is %v, which does not match %v", got[0], c.matches)
				}
				for _, info := range tasks {
					now := w.Task(info)
					if c.tries == 0 {
						if now != nil {
							t.Errorf("task is %s, want gone", now.State)
						}
						continue
					}
					if now == nil || now.State != asynq.TaskStateArchived || !strings.Contains(now.LastErr, c.lastErr) || now.Retried != c.tries-1 {
						t.Errorf("task is %+v; want it archived after %d tries with %q", now, c.tries, c.lastErr)
					}
				}
				if sent := h.LockLink.Sent(""); len(sent) != 0 {
					t.Errorf("Redis was asked: %v", sent)
				}
				b.balance(t, 2*max(c.tries, 1))
			})
		})
	}
}

// secretText is written in letters that nothing else in these tests is written in, so that a single one gives a leak away.
const (
	secretText   = "საიდუმლო"
	secretNumber = "31415926535897932384"
)

// secretForms are what a payload that holds both turns into when it is quoted, encoded, or shown in a decoder's error.
var secretForms = []string{
	secretNumber[:8], `\u10`, `\x83`, `\xe1`, "invalid character", "\u00e1",
	hex.EncodeToString([]byte(secretText)), strings.ToLower(base64.StdEncoding.EncodeToString([]byte(secretText))[:8]),
	fmt.Sprint([]byte(secretText)[:3])[1:8],
}

// leak returns what of a secret payload is in text, in any of the ways in which text could carry it.
func leak(text string) string {
	if i := strings.IndexFunc(text, func(r rune) bool { return unicode.Is(unicode.Georgian, r) }); i >= 0 {
		return text[i:]
	}
	text = strings.ToLower(text)
	for _, form := range secretForms {
		if strings.Contains(text, form) {
			return form
		}
	}
	return ""
}

func TestLeakSeesASecretInEveryForm(t *testing.T) {
	for _, text := range []string{
		secretText, "x" + secretText[:3], strconv.QuoteToASCII(secretText), fmt.Sprintf("%x", secretText), fmt.Sprintf("%X", secretText),
		fmt.Sprint([]byte(secretText)), secretNumber, base64.StdEncoding.EncodeToString([]byte(secretText)), fmt.Sprintf("%q", secretText[:2]),
		fmt.Sprint(json.Unmarshal([]byte(secretText), new(any))),
	} {
		if leak(text) == "" {
			t.Errorf("no leak seen in %q", text)
		}
	}
}

// Every ready-made KeyFunc meets every policy and every outcome. What is searched is all that leaves the package: each
// command it sends, each log line, each event and each error.
func TestNoPayloadEverShows(t *testing.T) {
	keys := map[string]KeyFunc{
		"ByTypeAndPayload":       ByTypeAndPayload,
		"ByType":                 ByType,
		"ByTaskID":               ByTaskID,
		"ByJSON()":               ByJSON(),
		"ByJSON(tenant.id)":      ByJSON("tenant.id", "n"),
		"ByHeader":               ByHeader("tenant"),
		"PerQueue(ByJSON)":       PerQueue(ByJSON("tenant.id")),
		"Shared(scope, ByJSON)":  Shared("scope", ByJSON("tenant.id")),
		"Shared(PerQueue)":       Shared("scope", PerQueue(ByTypeAndPayload)),
		"PerQueue(Shared(Type))": PerQueue(Shared("scope", ByType)),
	}
	policies := map[string]Policy{
		"skip": Skip(), "retry": Retry(2 * time.Second), "wait": Wait(time.Second), "archive": Archive(),
		"func": PolicyFunc(func(_ context.Context, _ *asynq.Task, held *HeldError) error {
			return fmt.Errorf("not now: %w", errors.New(held.Error()))
		}),
	}
	good := []byte(`{"tenant":{"id":"` + secretText + `"},"n":` + secretNumber + `,"` + secretText + `":1}`)
	bad := [][]byte{
		[]byte(secretText),
		[]byte(`{"tenant":{"id":` + secretText + `}}`),
		[]byte(`{"` + secretText + `":1,"` + secretText + `":2}`),
		[]byte(`{"tenant":"` + secretText + `","n":` + secretNumber + `}`),
		[]byte(`"\ud800` + secretText + `"`),
		[]byte(`[` + secretNumber),
		[]byte(secretText[:4]),
	}
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var (
			h        = w.Host("h")
			ofs      = map[string]*books{}
			handlers = map[string]asynq.Handler{}
			errs     complaints
		)
		// All tasks are handled in the contexts of three real ones: two in queue a, one of them with the ID of that in queue b.
		carriers := make(chan context.Context)
		h.Serve(asynq.Config{Queues: map[string]int{"a": 1, "b": 1}}, asynq.HandlerFunc(func(ctx context.Context, _ *asynq.Task) error {
			carriers <- ctx
			<-w.Over
			return nil
		}))
		carrier := func(id, queue string) context.Context {
			w.Enqueue(asynq.NewTask("carrier", nil), asynq.TaskID(id), asynq.Queue(queue), asynq.MaxRetry(1))
			return <-carriers
		}
		one, two, other := carrier("one", "a"), carrier("two", "a"), carrier("one", "b")

		for name, key := range keys {
			ofs[name] = &books{}
			for kind, policy := range policies {
				// A prefix for each, so that keys which leave out the type meet only their own.
				l := locker(h, ofs[name], WithKey(key), WithPolicy(policy), WithKeyPrefix(name+"/"+kind+":"),
					WithTTL(3*time.Second), WithDoneFor(2*time.Second), WithGracePeriod(time.Second))
				handlers[name+kind] = l.Middleware(l.Middleware(asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
					switch task.Headers()["does"] { // the inner middleware passes through
					case "fail":
						return errPrinter
					case "dawdle":
						w.Deaf(8 * time.Second)
					default:
						w.Deaf(3 * time.Second)
					}
					return nil
				})))
			}
		}
		start := func(ctx context.Context, kind, does string, payload []byte) {
			for name := range keys {
				task := asynq.NewTaskWithHeaders("type", payload, map[string]string{"tenant": secretText, "does": does})
				w.Spawn(func() {
					if err := handlers[name+kind].ProcessTask(ctx, task); err != nil {
						errs.HandleError(ctx, task, err)
					}
				})
			}
		}
		lockKeys := func() (found []string) {
			for _, b := range ofs {
				for _, e := range b.of(EventAcquired) {
					if strings.Contains(e.Key, "/skip:") && !slices.Contains(found, e.Key) {
						found = append(found, e.Key)
					}
				}
			}
			return found
		}

		for _, rival := range []context.Context{two, other, one} { // another task, its namesake, and a redelivery
			for kind := range policies {
				start(one, kind, "work", good)
			}
			time.Sleep(time.Second)
			for kind := range policies {
				start(rival, kind, "work", good)
			}
			time.Sleep(3 * time.Second)
			start(rival, "skip", "work", good) // the work is done
			time.Sleep(6 * time.Second)
		}
		start(one, "skip", "fail", good)
		time.Sleep(time.Second)
		short, cancel := context.WithTimeout(one, time.Second)
		defer cancel()
		start(short, "skip", "dawdle", good) // beyond its context and the grace period
		time.Sleep(14 * time.Second)
		start(one, "skip", "dawdle", good)
		time.Sleep(2 * time.Second)
		for _, key := range lockKeys() {
			w.Redis.Del(key)
		}
		time.Sleep(10 * time.Second)
		for _, text := range []string{"NOAUTH Authentication required.", "BUSY Redis is busy running a script."} {
			fault := h.LockLink.Every("SET").Refuse(text)
			start(one, "skip", "fail", good)
			time.Sleep(time.Second)
			fault.Lift()
		}
		for _, put := range []func(key string){
			func(key string) { _ = w.Redis.Set(key, "somebody's own text") },
			func(key string) { _, _ = w.Redis.Push(key, "a list") },
			func(key string) { _ = w.Redis.Set(key, "redislock/99 ?") },
		} {
			for _, key := range lockKeys() {
				w.Redis.Del(key)
				put(key)
			}
			start(one, "skip", "fail", good)
			time.Sleep(time.Second)
			for _, key := range lockKeys() {
				w.Redis.Del(key)
			}
		}
		for _, payload := range bad {
			start(one, "skip", "fail", payload)
		}
		time.Sleep(time.Second)
		h.LockLink.Cut()
		start(one, "skip", "fail", good)
		time.Sleep(3 * time.Second)

		for name, b := range ofs {
			for _, kind := range []EventKind{
				EventRan, EventSkipped, EventDone, EventRequeued, EventArchived, EventRefused, EventPassed,
				EventAcquired, EventReleased, EventLost, EventAbandoned,
			} {
				if b.count(kind) == 0 {
					t.Errorf("%s: this test should see every kind of event, but none that says %q: %s", name, kind, b)
				}
			}
			for _, e := range b.of() {
				if s := leak(fmt.Sprintf("%+v %v", e, e.Err)); s != "" {
					t.Errorf("%s: an event shows %q: %+v", name, s, e)
				}
			}
		}
		for _, c := range h.LockLink.Sent("") {
			if s := leak(c.String()); s != "" {
				t.Errorf("a command shows %q: %s", s, c)
			}
		}
		for _, err := range errs.all() {
			if s := leak(fmt.Sprintf("%v %+v", err, err)); s != "" {
				t.Errorf("an error shows %q: %v", s, err)
			}
		}
		lines := w.Lines()
		if len(lines) < 500 || len(errs.all()) < 200 {
			t.Errorf("only %d log lines and %d errors", len(lines), len(errs.all()))
		}
		for _, line := range lines {
			if s := leak(line); s != "" {
				t.Errorf("a log line shows %q: %s", s, line)
			}
		}
	})
}

// slotOf is Redis Cluster's: CRC16 (XMODEM) of what stands between the first brace and the next closing one.
func slotOf(key string) uint16 {
	if open := strings.IndexByte(key, '{'); open >= 0 {
		if length := strings.IndexByte(key[open+1:], '}'); length > 0 {
			key = key[open+1:][:length]
		}
	}
	var crc uint16
	for i := range len(key) {
		crc ^= uint16(key[i]) << 8
		for range 8 {
			carry := crc&0x8000 != 0
			crc <<= 1
			if carry {
				crc ^= 0x1021
			}
		}
	}
	return crc % 16384
}

func TestSlotOfIsThatOfTheClusterSpecification(t *testing.T) {
	for key, want := range map[string]uint16{"123456789": 0x31C3, "foo{bar}baz": 5061, "bar": 5061, "foo{}{bar}": 8363, "{user1000}.x": 3443} {
		if got := slotOf(key); got != want {
			t.Errorf("slot of %q is %d, want %d", key, got, want)
		}
	}
}

func TestAllKeysOfALockShareASlot(t *testing.T) {
	names := []string{
		"plain", "report:nightly", "{", "}", "{}", "}{", "a{b}c", "{a}{b}", "a}b{c", "tab\tnewline\n", "\x00", "\xff\xfe", "žluťoučký kůň", "日本語",
		" ", ":", strings.Repeat("x", 200), strings.Repeat("x", 201), strings.Repeat("{", 300), Digest("d", "{", "}"), Digest("{x}"),
	}
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		h := w.Host("h")
		for _, prefix := range []string{defaultPrefix, "x", "a:b c:"} {
			l := locker(h, &b, WithKeyPrefix(prefix), WithDoneFor(time.Minute))
			tags := map[string]string{}
			for _, name := range names {
				h.LockLink.Forget()
				if err := l.Do(t.Context(), name, func(ctx context.Context) error {
					k, _ := FromContext(ctx)
					return k.Check(ctx)
				}); err != nil {
					t.Fatalf("%q: %v", name, err)
				}
				_ = l.ForceRelease(t.Context(), name)
				var all []string
				for _, c := range h.LockLink.Sent("") {
					all = append(all, c.Keys()...)
				}
				if len(all) < 4 {
					t.Fatalf("%q: only %q seen", name, all)
				}
				first := all[0]
				tag, tagged := strings.CutPrefix(first, prefix+"{")
				tag, closed := strings.CutSuffix(tag, "}")
				if !tagged || !closed || tag == "" || strings.ContainsAny(tag, "{}") {
					t.Errorf("%q: the key %q is not the prefix and the name in braces", name, first)
				}
				if slotOf(first) != slotOf(tag) {
					t.Errorf("%q: the key %q is not in the slot of its name", name, first)
				}
				for _, key := range all {
					if slotOf(key) != slotOf(first) || !strings.HasPrefix(key, first) {
						t.Errorf("%q: keys %q and %q are not kept together", name, first, key)
					}
				}
				if other, taken := tags[tag]; taken {
					t.Errorf("%q and %q share the key %q", name, other, first)
				}
				tags[tag] = name
			}
		}
	})
}

// --- More than one middleware ---

func TestMountedTwiceTakesOneLock(t *testing.T) {
	mountings := map[string]func(a, b *Locker, handler asynq.Handler) asynq.Handler{
		"the same one twice": func(a, _ *Locker, handler asynq.Handler) asynq.Handler {
			mux := asynq.NewServeMux()
			mux.Use(a.Middleware, a.Middleware)
			mux.Handle("print", handler)
			return mux
		},
		"two with equal options": func(a, b *Locker, handler asynq.Handler) asynq.Handler {
			mux := asynq.NewServeMux()
			mux.Use(a.Middleware, b.Middleware)
			mux.Handle("print", handler)
			return mux
		},
		"around all and around one": func(a, b *Locker, handler asynq.Handler) asynq.Handler {
			mux := asynq.NewServeMux()
			mux.Use(a.Middleware)
			mux.Handle("print", b.Middleware(handler))
			return mux
		},
		"a mux in a mux": func(a, b *Locker, handler asynq.Handler) asynq.Handler {
			inner := asynq.NewServeMux()
			inner.Use(b.Middleware)
			inner.Handle("print", handler)
			outer := asynq.NewServeMux()
			outer.Use(a.Middleware)
			outer.Handle("print", inner)
			return outer
		},
		"called from within a handler": func(a, b *Locker, handler asynq.Handler) asynq.Handler {
			return a.Middleware(asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
				return b.Middleware(handler).ProcessTask(ctx, task)
			}))
		},
	}
	for name, mount := range mountings {
		t.Run(name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var outer, inner books
				var runs virtual.Tally
				h := w.Host("h")
				a, b := locker(h, &outer, WithTTL(2*time.Second)), locker(h, &inner, WithTTL(2*time.Second))
				h.Serve(ServerConfig(asynq.Config{}), mount(a, b, asynq.HandlerFunc(func(ctx context.Context, _ *asynq.Task) error {
					defer runs.Start("print")()
					k, ok := FromContext(ctx)
					if !ok || k.Key() != lockKeys(w)[0] {
						t.Errorf("lock in the context: %v", k)
					}
					return virtual.Busy(ctx, 5*time.Second)
				})))
				info := w.Enqueue(asynq.NewTask("print", nil))
				w.Until(20*time.Second, "task done", func() bool { return w.Settled(info) })
				if s := w.State(info); s != "gone" || runs.Count("print") != 1 {
					t.Errorf("task is %s after %d runs", s, runs.Count("print"))
				}
				w.Untouched(info)
				if n := len(h.LockLink.Sent("SET")); n != 1 {
					t.Errorf("%d tries to acquire, want 1", n)
				}
				all := books{events: append(outer.of(), inner.of()...)}
				if all.count(EventPassed) != 1 || all.count(EventRan) != 1 || all.count(EventAcquired) != 1 {
					t.Errorf("events: %s", &all)
				}
				all.balance(t, 2)
			})
		})
	}
}

// A lock that does not do what the inner middleware's options promise must not stand in for it, and waiting for it would
// be waiting for oneself.
func TestMountedTwiceWithDifferentPromisesIsAFailureThatSaysSo(t *testing.T) {
	for name, inner := range map[string]func(*virtual.World, *virtual.Host, *books) *Locker{
		"TTL": func(_ *virtual.World, h *virtual.Host, b *books) *Locker {
			return locker(h, b, WithTTL(20*time.Second))
		},
		"done-for":     func(_ *virtual.World, h *virtual.Host, b *books) *Locker { return locker(h, b, WithDoneFor(time.Hour)) },
		"grace period": func(_ *virtual.World, h *virtual.Host, b *books) *Locker { return locker(h, b, WithGracePeriod(0)) },
		"fail-open":    func(_ *virtual.World, h *virtual.Host, b *books) *Locker { return locker(h, b, WithFailOpen()) },
		"fencing":      func(_ *virtual.World, h *virtual.Host, b *books) *Locker { return locker(h, b, WithFencing()) },
		"client": func(w *virtual.World, h *virtual.Host, b *books) *Locker {
			l, err := New(w.Dialer(h.LockLink), WithLogger(h.Logger), WithObserver(b.observe))
			if err != nil {
				w.T.Fatal(err)
			}
			return l
		},
	} {
		t.Run(name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var outer, within books
				var runs virtual.Tally
				h := w.Host("h")
				handler := asynq.HandlerFunc(func(context.Context, *asynq.Task) error {
					runs.Start("print")()
					return nil
				})
				h.Serve(ServerConfig(asynq.Config{RetryDelayFunc: everySecond}),
					locker(h, &outer).Middleware(inner(w, h, &within).Middleware(handler)))
				info := w.Enqueue(asynq.NewTask("print", nil), asynq.MaxRetry(2), asynq.Timeout(10*time.Minute))
				w.Until(time.Minute, "task settled", func() bool { return w.Settled(info) })
				now := w.Task(info)
				if now == nil || now.State != asynq.TaskStateArchived || now.Retried != 2 || !strings.Contains(now.LastErr, "call chain") {
					t.Errorf("task is %+v; want it archived after 3 tries with an error that speaks of the call chain", now)
				}
				if runs.Count("print") != 0 {
					t.Error("the handler ran")
				}
				if within.count(EventRefused) != 3 || outer.count(EventRan) != 3 {
					t.Errorf("events: outside %s, inside %s", &outer, &within)
				}
				outer.balance(t, 3)
			})
		})
	}
}

func TestALostLockDoesNotStandInForTheInnerMiddleware(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		h := w.Host("h")
		l := locker(h, &b)
		mux := asynq.NewServeMux()
		mux.Use(l.Middleware, func(next asynq.Handler) asynq.Handler {
			return asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
				w.Redis.Del(lockKeys(w)[0])
				<-ctx.Done()
				return next.ProcessTask(ctx, task)
			})
		}, l.Middleware)
		mux.HandleFunc("print", func(context.Context, *asynq.Task) error {
			t.Error("the handler ran without a valid lock")
			return nil
		})
		var told complaints
		h.Serve(ServerConfig(asynq.Config{RetryDelayFunc: everySecond, ErrorHandler: &told}), mux)
		info := w.Enqueue(asynq.NewTask("print", nil), asynq.MaxRetry(1))
		w.Until(time.Minute, "task archived", func() bool { return w.State(info) == "archived" })
		if got := told.all(); len(got) != 2 || !errors.Is(got[0], ErrLost) {
			t.Errorf("reported %v, want ErrLost twice", got)
		}
		b.balance(t, 4)
	})
}

func TestDoAndTryAcquireNeverPassThroughAHandlersLock(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		l := locker(w.Host("h"), &b)
		task := asynq.NewTask("print", nil)
		name, _ := l.Name(t.Context(), task)
		err := l.Middleware(asynq.HandlerFunc(func(ctx context.Context, _ *asynq.Task) error {
			if _, err := l.TryAcquire(ctx, name); !errors.Is(err, ErrHeld) {
				t.Errorf("TryAcquire: %v, want ErrHeld", err)
			}
			err := l.Do(ctx, name, func(context.Context) error {
				t.Error("Do ran next to the handler that holds its lock")
				return nil
			})
			if !errors.Is(err, ErrHeld) {
				t.Errorf("Do: %v, want ErrHeld", err)
			}
			return l.Do(ctx, "another", func(ctx context.Context) error {
				k, _ := FromContext(ctx)
				return k.Check(ctx)
			})
		})).ProcessTask(t.Context(), task)
		if err != nil || w.Elapsed() > time.Second {
			t.Errorf("%v after %s", err, w.Elapsed())
		}
		b.balance(t, 1)
	})
}

func TestAHandlerOfAnotherKeyInsideAHandlerTakesALockOfItsOwn(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		l := locker(w.Host("h"), &b)
		var inner *Lock
		leaf := l.Middleware(asynq.HandlerFunc(func(ctx context.Context, _ *asynq.Task) error {
			inner, _ = FromContext(ctx)
			if n := len(lockKeys(w)); n != 2 {
				t.Errorf("%d locks held, want 2", n)
			}
			return nil
		}))
		err := l.Middleware(asynq.HandlerFunc(func(ctx context.Context, _ *asynq.Task) error {
			outer, _ := FromContext(ctx)
			if err := leaf.ProcessTask(ctx, asynq.NewTask("page", nil)); err != nil {
				t.Error(err)
			}
			if inner == nil || inner == outer || inner.Context().Err() == nil || outer.Context().Err() != nil {
				t.Error("the inner lock should be another one, and end alone")
			}
			return outer.Check(ctx)
		})).ProcessTask(t.Context(), asynq.NewTask("print", nil))
		if err != nil {
			t.Error(err)
		}
		b.balance(t, 2)
	})
}

func TestMiddlewaresWithDifferentTypesStandSideBySide(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var mails, reports books
		var runs virtual.Tally
		h := w.Host("h")
		mailing := locker(h, &mails, WithTypes("mail:"), WithTTL(10*time.Second), WithPolicy(Archive()))
		reporting := locker(h, &reports, WithTypes("report", "survey:2"), WithTTL(5*time.Second), WithDoneFor(time.Hour))
		h.Serve(ServerConfig(asynq.Config{Concurrency: 50}), mailing.Middleware(reporting.Middleware(asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
			defer runs.Start(task.Type())()
			_, locked := FromContext(ctx)
			if want := !strings.HasPrefix(task.Type(), "un") && task.Type() != "mail"; locked != want {
				t.Errorf("%s runs with a lock: %v, want %v", task.Type(), locked, want)
			}
			return virtual.Busy(ctx, 3*time.Second)
		}))))
		types := map[string]*books{
			"mail:": &mails, "mail:a": &mails, "mail": nil, "unmail:a": nil, // as ServeMux matches: exactly, or what it begins with
			"report": &reports, "reports": &reports, "report:a": &reports, "survey:2": &reports, "unreport": nil,
		}
		for kind := range types {
			w.Enqueue(asynq.NewTask(kind, nil))
			w.Enqueue(asynq.NewTask(kind, nil))
		}
		w.Until(30*time.Second, "all settled", func() bool { return w.Drained() })
		for kind, b := range types {
			want, untouched := 1, b == nil
			if untouched {
				want = 2
			}
			if n := runs.Count(kind); n != want || len(runs.Overlaps()) != 3 {
				t.Errorf("%s ran %d times, want %d; overlaps: %v", kind, n, want, runs.Overlaps())
			}
			for name, owner := range map[string]*books{"mail": &mails, "report": &reports} {
				seen := slices.ContainsFunc(owner.of(), func(e Event) bool { return e.TaskType == kind })
				if seen != (owner == b) {
					t.Errorf("the %s middleware has an event for %s: %v", name, kind, seen)
				}
			}
		}
		if mails.count(EventArchived) != 2 || reports.count(EventDone) != 4 {
			t.Errorf("each keeps its own options: mails %s, reports %s", &mails, &reports)
		}
		if n := len(slices.DeleteFunc(h.LockLink.Sent("SET"), func(c virtual.Command) bool { return !strings.Contains(c.Args[0], "{un") })); n != 0 {
			t.Errorf("%d locks of types that match nothing", n)
		}
	})
}

func TestATaskWithoutAServerRunsUnderItsLock(t *testing.T) {
	for _, c := range []struct {
		name   string
		key    KeyFunc
		err    error
		policy Policy
		copy   error // what a copy gets meanwhile
	}{
		{"default", ByTypeAndPayload, nil, Policy{}, ErrHeld}, // of any WithKey
		{"ByType", ByType, nil, Skip(), nil},
		{"ByJSON", ByJSON("a"), nil, Archive(), asynq.SkipRetry},
		{"Shared", Shared("s", ByType), nil, Wait(time.Second), ErrHeld},
		{"PolicyFunc", ByType, nil, PolicyFunc(func(context.Context, *asynq.Task, *HeldError) error { return errPrinter }), errPrinter},
		{"ByTaskID", ByTaskID, ErrInvalidKey, Policy{}, nil},
		{"PerQueue", PerQueue(ByType), ErrInvalidKey, Policy{}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				l := locker(w.Host("h"), &b, WithKey(c.key), WithPolicy(c.policy))
				task := asynq.NewTask("print", []byte(`{"a":1}`))
				handler := func(fn func(context.Context) error) error {
					return l.Middleware(asynq.HandlerFunc(func(ctx context.Context, _ *asynq.Task) error { return fn(ctx) })).
						ProcessTask(t.Context(), task)
				}
				ran := false
				err := handler(func(ctx context.Context) error {
					ran = true
					k, ok := FromContext(ctx)
					if !ok {
						t.Fatal("no lock")
					}
					holder, ok, err := l.Holder(ctx, strings.TrimSuffix(strings.TrimPrefix(k.Key(), defaultPrefix+"{"), "}"))
					if !ok || err != nil || holder.TaskType != "print" || holder.TaskID != "" || holder.Queue != "" {
						t.Errorf("holder is %+v, %v, %v", holder, ok, err)
					}
					start := time.Now()
					if err := handler(func(context.Context) error { t.Error("the copy ran"); return nil }); !errors.Is(err, c.copy) {
						t.Errorf("a copy gets %v, want %v", err, c.copy)
					}
					if took := time.Since(start); took > time.Second {
						t.Errorf("a copy waited for %s", took)
					}
					return errPrinter
				})
				if c.err == nil && (!ran || err != errPrinter) || c.err != nil && (ran || !errors.Is(err, c.err)) {
					t.Errorf("ran: %v, %v", ran, err)
				}
				if keys := lockKeys(w); len(keys) != 0 {
					t.Errorf("keys left: %q", keys)
				}
				b.balance(t, b.count(EventRan, EventSkipped, EventRequeued, EventArchived, EventRefused))
			})
		})
	}
}

// --- A Redis that does not answer, or not as hoped ---

// weathers are what ErrUnavailable stands for: nobody can say whether the lock is free.
var weathers = map[string]func(*virtual.Link){
	"connections refused": (*virtual.Link).Cut,
	"silence":             (*virtual.Link).Hang,
	"slower than TTL/4":   func(l *virtual.Link) { l.Slow(outageTTL/4 + 100*time.Millisecond) },
	"requests lost":       func(l *virtual.Link) { l.Every("SET").LoseRequest() },
	"replies lost":        func(l *virtual.Link) { l.Every("SET").LoseReply() },
	"requests swallowed":  func(l *virtual.Link) { l.Every("SET").SwallowRequest() },
	"replies swallowed":   func(l *virtual.Link) { l.Every("SET").SwallowReply() },
	"LOADING":             refusing("LOADING Redis is loading the dataset in memory"),
	"BUSY":                refusing("BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE."),
	"READONLY":            refusing("READONLY You can't write against a read only replica."),
	"MASTERDOWN":          refusing("MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'."),
	"CLUSTERDOWN":         refusing("CLUSTERDOWN Hash slot not served"),
	"TRYAGAIN":            refusing("TRYAGAIN Multiple keys request during rehashing of slot"),
	"NOREPLICAS":          refusing("NOREPLICAS Not enough good replicas to write."),
	"OOM":                 refusing("OOM command not allowed when used memory > 'maxmemory'."),
	"MISCONF":             refusing("MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk."),
	"too many clients":    refusing("ERR max number of clients reached"),
}

const outageTTL = 4 * time.Second

func refusing(text string) func(*virtual.Link) {
	return func(l *virtual.Link) { l.Every("SET").Refuse(text) }
}

func TestWhileRedisCannotBeAskedATaskIsPutBackAndNotCounted(t *testing.T) {
	for name, weather := range weathers {
		t.Run(name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var (
					b    books
					runs virtual.Tally
					told complaints
					h    = w.Host("h")
				)
				weather(h.LockLink)
				h.Serve(ServerConfig(asynq.Config{ErrorHandler: &told, RetryDelayFunc: everySecond}),
					locker(h, &b, WithTTL(outageTTL)).Middleware(asynq.HandlerFunc(func(context.Context, *asynq.Task) error {
						runs.Start("print")()
						return nil
					})))
				info := w.Enqueue(asynq.NewTask("print", nil), asynq.MaxRetry(1))
				w.Until(time.Minute, "put back three times", func() bool { return b.count(EventRequeued) >= 3 })
				w.Untouched(info)
				if runs.Count("print") != 0 || len(told.all()) != 0 {
					t.Errorf("%d runs; reported: %v", runs.Count("print"), told.all())
				}
				for i, e := range b.of(EventRequeued) {
					if !errors.Is(e.Err, ErrUnavailable) || errors.Is(e.Err, ErrHeld) || errors.Is(e.Err, ErrDone) || !strings.Contains(e.Err.Error(), e.Key) {
						t.Errorf("attempt %d failed with %v; want ErrUnavailable alone, with the key in it", i, e.Err)
					}
					if e.Waited > outageTTL/4 {
						t.Errorf("attempt %d took %s, more than a quarter of the TTL", i, e.Waited)
					}
				}
				sets := h.LockLink.Sent("SET")
				tokens := slices.CompactFunc(sets, func(a, b virtual.Command) bool { return a.Args[1] == b.Args[1] })
				// TTL/2 give or take a fifth, and what a try took; asynq keeps whole seconds and looks once a second.
				for i := 1; i < len(tokens); i++ {
					if gap := tokens[i].At.Sub(tokens[i-1].At); gap < outageTTL*4/10-time.Second || gap > outageTTL*6/10+outageTTL/4+2*time.Second {
						t.Errorf("tries %d and %d are %s apart, want TTL/2 more or less", i-1, i, gap)
					}
				}

				h.LockLink.Heal()
				w.Until(3*outageTTL, "task done", func() bool { return w.State(info) == "gone" })
				if n := runs.Count("print"); n != 1 {
					t.Errorf("%d runs, want 1", n)
				}
				w.Untouched(info)
				w.Until(outageTTL, "nothing left behind", func() bool { return len(lockKeys(w)) == 0 })
				b.balance(t, 1+b.count(EventRequeued))
			})
		})
	}
}

func TestWithFailOpenATaskRunsOnceWithoutALockWhileRedisCannotBeAsked(t *testing.T) {
	for name, weather := range weathers {
		t.Run(name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				var runs virtual.Tally
				h := w.Host("h")
				weather(h.LockLink)
				h.Serve(ServerConfig(asynq.Config{}), locker(h, &b, WithTTL(outageTTL), WithFailOpen(), WithDoneFor(time.Hour)).Middleware(asynq.HandlerFunc(
					func(ctx context.Context, _ *asynq.Task) error {
						defer runs.Start("print")()
						if k, ok := FromContext(ctx); ok {
							t.Errorf("runs with a lock: %v", k)
						}
						return virtual.Busy(ctx, outageTTL/2)
					})))
				info := w.Enqueue(asynq.NewTask("print", nil), asynq.MaxRetry(0))
				w.Until(3*outageTTL, "task done", func() bool { return w.State(info) == "gone" })
				if n := runs.Count("print"); n != 1 {
					t.Errorf("%d runs, want 1", n)
				}
				if ran := b.of(EventRan); len(ran) != 1 || !ran[0].Unlocked || ran[0].Err != nil || ran[0].Held != 0 {
					t.Errorf("outcome %+v; want one that says it ran unlocked", ran)
				}
				h.LockLink.Heal()
				w.Until(2*outageTTL, "nothing left behind", func() bool { return len(lockKeys(w)) == 0 })
				b.balance(t, 1)
			})
		})
	}
}

func TestTheLastAttemptStandsByUntilRedisIsBack(t *testing.T) {
	for name, weather := range weathers {
		t.Run(name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				var runs virtual.Tally
				h := w.Host("h")
				h.LockLink.Slow(2 * time.Millisecond)
				weather(h.LockLink)
				h.Serve(ServerConfig(asynq.Config{}), locker(h, &b, WithTTL(outageTTL)).Middleware(asynq.HandlerFunc(
					func(context.Context, *asynq.Task) error {
						runs.Start("print")()
						return nil
					})))
				info := w.Enqueue(asynq.NewTask("print", nil), asynq.MaxRetry(0), asynq.Timeout(5*time.Minute))
				time.Sleep(4 * time.Second)
				if s := w.State(info); s != "active" {
					t.Fatalf("task is %s, want active", s)
				}
				tries := slices.CompactFunc(h.LockLink.Sent("SET"), func(a, b virtual.Command) bool { return a.Args[1] == b.Args[1] })
				if n := len(tries); n > 150 { // a twentieth of the time waited apart, at least
					t.Errorf("%d tries in four seconds, at a Redis that is in trouble", n)
				}
				h.LockLink.Heal()
				w.Until(2*outageTTL, "task done", func() bool { return w.State(info) == "gone" })
				if n := runs.Count("print"); n != 1 {
					t.Errorf("%d runs, want 1", n)
				}
				b.balance(t, 1)
			})
		})
	}
}

// What an operator has to mend is not hidden in endless retries, and never run unlocked.
func TestARefusalIsAFailureThatCountsWithItsText(t *testing.T) {
	for name, c := range map[string]struct {
		weather func(w *virtual.World, h *virtual.Host, key string)
		text    string
	}{
		"NOAUTH": {func(_ *virtual.World, h *virtual.Host, _ string) {
			refusing("NOAUTH Authentication required.")(h.LockLink)
		}, "NOAUTH Authentication required."},
		"NOPERM": {func(_ *virtual.World, h *virtual.Host, _ string) {
			refusing("NOPERM User worker has no permissions to run the 'set' command")(h.LockLink)
		}, "NOPERM User worker has no permissions to run the 'set' command"},
		"CROSSSLOT": {func(_ *virtual.World, h *virtual.Host, _ string) {
			refusing("CROSSSLOT Keys in request don't hash to the same slot")(h.LockLink)
		}, "CROSSSLOT Keys in request don't hash to the same slot"},
		"syntax error": {func(_ *virtual.World, h *virtual.Host, _ string) { refusing("ERR syntax error")(h.LockLink) }, "ERR syntax error"},
		"a list at the key": {func(w *virtual.World, _ *virtual.Host, key string) { _, _ = w.Redis.Push(key, "a", "b") },
			"WRONGTYPE Operation against a key holding the wrong kind of value"},
		"a hash at the key": {func(w *virtual.World, _ *virtual.Host, key string) { w.Redis.HSet(key, "a", "b") },
			"WRONGTYPE Operation against a key holding the wrong kind of value"},
		"foreign text at the key": {func(w *virtual.World, _ *virtual.Host, key string) { _ = w.Redis.Set(key, "somebody's notes") }, "not a lock"},
		"nothing at the key":      {func(w *virtual.World, _ *virtual.Host, key string) { _ = w.Redis.Set(key, "") }, "not a lock"},
		"a broken value":          {func(w *virtual.World, _ *virtual.Host, key string) { _ = w.Redis.Set(key, valueVersion+`{"host":`) }, "not a lock"},
	} {
		t.Run(name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var (
					b    books
					told complaints
					h    = w.Host("h")
					l    = locker(h, &b, WithTTL(outageTTL), WithPolicy(Retry(time.Hour)), WithFailOpen())
					task = asynq.NewTask("print", nil)
				)
				name, _ := l.Name(t.Context(), task)
				key, _ := l.redisKey(name)
				c.weather(w, h, key)
				before := dumpOf(w, key)
				h.Serve(ServerConfig(asynq.Config{ErrorHandler: &told, RetryDelayFunc: everySecond}),
					l.Middleware(asynq.HandlerFunc(func(context.Context, *asynq.Task) error {
						t.Error("the handler ran")
						return nil
					})))
				info := w.Enqueue(task, asynq.MaxRetry(2))
				w.Until(20*time.Second, "task settled", func() bool { return w.Settled(info) })

				now := w.Task(info)
				if now == nil || now.State != asynq.TaskStateArchived || now.Retried != 2 || !strings.Contains(now.LastErr, c.text) || !strings.Contains(now.LastErr, key) {
					t.Errorf("task is %+v; want it archived after 3 tries with %q and the key", now, c.text)
				}
				if failed := w.Stats("default").Failed; failed != 3 {
					t.Errorf("asynq counted %d failures, want 3", failed)
				}
				for _, err := range told.all() {
					for _, other := range []error{ErrUnavailable, ErrHeld, ErrDone, ErrLost, ErrClosed} {
						if errors.Is(err, other) {
							t.Errorf("%v matches %v", err, other)
						}
					}
					if strings.Contains(err.Error(), "notes") {
						t.Errorf("%v shows what is at the key", err)
					}
				}
				if refused := b.of(EventRefused); len(told.all()) != 3 || len(refused) != 3 || !strings.Contains(refused[0].Err.Error(), c.text) {
					t.Errorf("reported %v, events %s", told.all(), &b)
				}
				if after := dumpOf(w, key); after != before {
					t.Errorf("at the key was %s, now %s", before, after)
				}
				b.balance(t, 3)
			})
		})
	}
}

// dumpOf describes what is at a key, whatever it is.
func dumpOf(w *virtual.World, key string) string {
	text, _ := w.Redis.Get(key)
	list, _ := w.Redis.List(key)
	return fmt.Sprintf("%s %q %q %q %s", w.Redis.Type(key), text, list, w.Redis.HGet(key, "a"), w.Redis.TTL(key))
}

// Otherwise a handler could escape its retry count, and run for ever.
func TestAHandlersOwnErrorOfThisPackageCountsLikeAnyOther(t *testing.T) {
	for name, result := range map[string]func(ctx context.Context, l *Locker) error{
		"HeldError": func(context.Context, *Locker) error { return &HeldError{Key: "k", RetryIn: time.Hour} },
		"ErrUnavailable": func(context.Context, *Locker) error {
			return fmt.Errorf("fetch: %w", ErrUnavailable)
		},
		"ErrClosed": func(context.Context, *Locker) error { return ErrClosed },
		"what Do met": func(ctx context.Context, l *Locker) error {
			return l.Do(ctx, "taken", func(context.Context) error { return nil })
		},
		"what another task met": func(ctx context.Context, l *Locker) error {
			return l.Middleware(asynq.NotFoundHandler()).ProcessTask(ctx, asynq.NewTask("other", nil))
		},
		"what another task met, wrapped and joined": func(ctx context.Context, l *Locker) error {
			err := l.Middleware(asynq.NotFoundHandler()).ProcessTask(ctx, asynq.NewTask("other", nil))
			return errors.Join(errPrinter, fmt.Errorf("sub-task: %w", err))
		},
	} {
		t.Run(name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var (
					b    books
					told complaints
					runs virtual.Tally
					h    = w.Host("h")
					l    = locker(h, &b, WithPolicy(Retry(time.Hour)))
				)
				other, _ := l.Name(t.Context(), asynq.NewTask("other", nil))
				for _, name := range []string{"taken", other} {
					k, err := l.TryAcquire(t.Context(), name)
					if err != nil {
						t.Fatal(err)
					}
					defer func() { _ = k.Release(t.Context()) }()
				}
				var returned error
				h.Serve(ServerConfig(asynq.Config{ErrorHandler: &told, RetryDelayFunc: everySecond}),
					l.Middleware(asynq.HandlerFunc(func(ctx context.Context, _ *asynq.Task) error {
						runs.Start("print")()
						returned = result(ctx, l)
						return returned
					})))
				// On its last attempt the other task stays almost until the deadline before it gives up.
				info := w.Enqueue(asynq.NewTask("print", nil), asynq.MaxRetry(2), asynq.Timeout(10*time.Second))
				w.Until(30*time.Second, "task archived", func() bool { return w.State(info) == "archived" })
				if runs.Count("print") != 3 || w.Stats("default").Failed != 3 || len(told.all()) != 3 {
					t.Errorf("%d runs, %d failures, reported %v; want 3 of each", runs.Count("print"), w.Stats("default").Failed, told.all())
				}
				last := told.all()[2]
				if last.Error() != returned.Error() {
					t.Errorf("asynq sees %q, the handler returned %q", last, returned)
				}
				for _, target := range []error{ErrHeld, ErrUnavailable, ErrClosed, errPrinter} {
					if errors.Is(last, target) != errors.Is(returned, target) {
						t.Errorf("%v and %v do not match the same", last, returned)
					}
				}
				var seen, own *HeldError
				if errors.As(last, &seen) != errors.As(returned, &own) || seen != own {
					t.Errorf("the *HeldError in it is %v, the handler's was %v", seen, own)
				}
			})
		})
	}
}

func TestScriptFlushBetweenAnyTwoCallsChangesNothing(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		h := w.Host("h")
		flush := func() {
			if err := w.RDB.ScriptFlush(context.Background()).Err(); err != nil {
				t.Error(err)
			}
		}
		for _, verb := range []string{"SET", "EVALSHA", "GET", "DEL"} {
			h.LockLink.Every(verb).Before(flush)
		}
		l := locker(h, &b, WithTTL(6*time.Second), WithDoneFor(time.Minute), WithPolicy(Retry(time.Second)))
		var runs virtual.Tally
		h.Serve(ServerConfig(asynq.Config{RetryDelayFunc: everySecond}), l.Middleware(asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
			defer runs.Start(task.Type())()
			if err := virtual.Busy(ctx, 20*time.Second); err != nil {
				return err
			}
			k, _ := FromContext(ctx)
			if err := k.Check(ctx); err != nil {
				return err
			}
			if task.Type() == "fails" && runs.Count("fails") == 1 {
				return errPrinter
			}
			return nil
		})))
		for _, kind := range []string{"works", "works", "fails"} {
			w.Enqueue(asynq.NewTask(kind, nil), asynq.MaxRetry(3))
		}
		w.Until(2*time.Minute, "all done", func() bool { return w.Drained() })
		if runs.Count("works") != 1 || runs.Count("fails") != 2 || len(runs.Overlaps()) != 0 || w.Stats("default").Failed != 1 {
			t.Errorf("works %d, fails %d, overlaps %v, failed %d", runs.Count("works"), runs.Count("fails"), runs.Overlaps(), w.Stats("default").Failed)
		}
		for _, e := range b.of(EventReleased, EventLost, EventAbandoned) {
			if e.Kind != EventReleased || e.Err != nil {
				t.Errorf("a lock ended as %s: %v", e.Kind, e.Err)
			}
		}
		name, _ := l.Name(t.Context(), asynq.NewTask("works", nil))
		if holder, ok, err := l.Holder(t.Context(), name); !ok || !holder.Done || err != nil {
			t.Errorf("at the key: %v, %v, %v; want a done marker", holder, ok, err)
		}
		if err := l.ForceRelease(t.Context(), name); err != nil || len(lockKeys(w)) != 1 {
			t.Errorf("%v; left: %v", err, lockKeys(w))
		}
		for _, script := range []*script{extendScript, releaseScript, doneScript} { // twice: by its hash and by its source
			if n := len(h.LockLink.Sent("EVAL")); n < 10 || len(h.LockLink.Sent(script.Hash())) < 2 {
				t.Errorf("%d scripts were unknown by their hash", n)
			}
		}
		b.balance(t, 3+b.count(EventRequeued)+b.count(EventDone))
	})
}

// An acquire that took too long is given back, whatever Redis said in the end.
func TestAnAcquireSlowerThanAQuarterOfTheTTLIsGivenBack(t *testing.T) {
	for name, slow := range map[string]func(*virtual.Fault){
		"request": func(f *virtual.Fault) { f.Delay(outageTTL/4 + 50*time.Millisecond) },
		"reply":   func(f *virtual.Fault) { f.DelayReply(outageTTL/4 + 50*time.Millisecond) },
	} {
		t.Run(name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				h := w.Host("h")
				slow(h.LockLink.Next("SET"))
				l := locker(h, &b, WithTTL(outageTTL))
				if k, err := l.TryAcquire(t.Context(), "work"); k != nil || !errors.Is(err, ErrUnavailable) {
					t.Errorf("slow: %v, %v; want ErrUnavailable", k, err)
				}
				if took := w.Elapsed(); took != outageTTL/4 {
					t.Errorf("took %s, want %s", took, outageTTL/4)
				}
				time.Sleep(100 * time.Millisecond)
				if keys := lockKeys(w); len(keys) != 0 {
					t.Errorf("not given back: %q", keys)
				}
				slow = func(f *virtual.Fault) { f.Delay(outageTTL/4 - 50*time.Millisecond) }
				slow(h.LockLink.Next("SET"))
				k, err := l.TryAcquire(t.Context(), "work")
				if err != nil {
					t.Fatalf("just in time: %v", err)
				}
				if err := k.Release(t.Context()); err != nil {
					t.Error(err)
				}
				b.balance(t, 0)
			})
		})
	}
}

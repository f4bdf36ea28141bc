package redislock

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"example.com/redislock/internal/virtual"
	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
)

// aClient returns a client that never connects, for tests that only configure.
func aClient(t *testing.T) *redis.Client {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:0"})
	t.Cleanup(func() { _ = rdb.Close() })
	return rdb
}

// --- What cannot be used ---

// badOptions name what the error must say: the option, and what it takes.
var badOptions = []struct {
	name string
	opt  Option
	says []string
}{
	{"nil", nil, []string{"option 1 is nil"}},
	{"nil in a bundle", Options(WithFailOpen(), nil), []string{"option 2 is nil"}},
	{"bad one in a bundle in a bundle", Options(Options(WithTTL(0))), []string{"WithTTL"}},
	{"key nil", WithKey(nil), []string{"WithKey", "nil"}},
	{"key typed nil", WithKey(KeyFunc(nil)), []string{"WithKey", "nil"}},
	{"no types", WithTypes(), []string{"WithTypes", "at least one"}},
	{"no types, spread", WithTypes([]string{}...), []string{"WithTypes", "at least one"}},
	{"empty type", WithTypes("mail:", ""), []string{"WithTypes", `""`, "blank"}},
	{"blank type", WithTypes(" \t"), []string{"WithTypes", `" \t"`, "blank"}},
	{"empty prefix", WithKeyPrefix(""), []string{"WithKeyPrefix", `""`, "1 to 100 bytes"}},
	{"prefix with opening brace", WithKeyPrefix("a{b:"), []string{"WithKeyPrefix", `"a{b:"`, "braces"}},
	{"prefix with closing brace", WithKeyPrefix("a}b:"), []string{"WithKeyPrefix", `"a}b:"`, "braces"}},
	{"prefix with a line break", WithKeyPrefix("a\nb:"), []string{"WithKeyPrefix", `"a\nb:"`, "control characters"}},
	{"prefix that is no UTF-8", WithKeyPrefix("a\xffb:"), []string{"WithKeyPrefix", `"a\xffb:"`, "UTF-8"}},
	{"prefix too long", WithKeyPrefix(strings.Repeat("x", 101)), []string{"WithKeyPrefix", "xxx", "100 bytes"}},
	{"TTL zero", WithTTL(0), []string{"WithTTL", "0s", "at least 1s"}},
	{"TTL negative", WithTTL(-time.Minute), []string{"WithTTL", "-1m0s", "at least 1s"}},
	{"TTL short", WithTTL(time.Second - 1), []string{"WithTTL", "999.999999ms", "at least 1s"}},
	{"TTL in the wrong unit", WithTTL(30), []string{"WithTTL", "30ns", "at least 1s"}},
	{"Retry negative", WithPolicy(Retry(-time.Second)), []string{"WithPolicy", "-1s", "0 or more"}},
	{"Wait negative", WithPolicy(Wait(-1)), []string{"WithPolicy", "-1ns", "0 or more"}},
	{"PolicyFunc nil", WithPolicy(PolicyFunc(nil)), []string{"WithPolicy", "PolicyFunc", "nil"}},
	{"done-for negative", WithDoneFor(-time.Hour), []string{"WithDoneFor", "-1h0m0s", "0 for no marker", "1ms"}},
	{"done-for short", WithDoneFor(time.Millisecond - 1), []string{"WithDoneFor", "999.999µs", "at least 1ms"}},
	{"grace period negative", WithGracePeriod(-1), []string{"WithGracePeriod", "-1ns", "0 or more"}},
	{"observer nil", WithObserver(nil), []string{"WithObserver", "nil"}},
	{"logger nil", WithLogger(nil), []string{"WithLogger", "nil"}},
	{"bad one before a good one", Options(WithTTL(0), WithTTL(time.Minute)), []string{"WithTTL", "0s"}},
}

func TestABadOptionIsAnErrorThatNamesItAndWhatItTakes(t *testing.T) {
	for _, c := range badOptions {
		t.Run(c.name, func(t *testing.T) {
			l, err := New(aClient(t), c.opt)
			if l != nil || err == nil {
				t.Fatalf("New returned %v, %v", l, err)
			}
			for _, want := range append(c.says, "redislock: configure") {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q does not say %q", err, want)
				}
			}
			if got := panicOf(func() { Middleware(aClient(t), c.opt) }); got != err.Error() {
				t.Errorf("Middleware panics with %v, New says %q", got, err)
			}
		})
	}
}

// panicOf returns what fn panics with.
func panicOf(fn func()) (p any) {
	defer func() { p = recover() }()
	fn()
	return nil
}

// byValue is a client that cannot be compared with another.
type byValue struct {
	redis.UniversalClient
	_ []int
}

func TestAClientThatCannotHoldLocksIsAnErrorThatSaysWhy(t *testing.T) {
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": "127.0.0.1:0"}, HeartbeatFrequency: time.Hour})
	defer func() { _ = ring.Close() }()
	for name, c := range map[string]struct {
		rdb  redis.UniversalClient
		says []string
	}{
		"nil":            {nil, []string{"client is nil"}},
		"nil client":     {(*redis.Client)(nil), []string{"client is nil"}},
		"nil cluster":    {(*redis.ClusterClient)(nil), []string{"client is nil"}},
		"nil ring":       {(*redis.Ring)(nil), []string{"client is nil"}},
		"ring":           {ring, []string{"*redis.Ring", "moves keys when a shard drops", "cluster client"}},
		"not comparable": {byValue{UniversalClient: aClient(t)}, []string{"byValue", "compared", "pointer"}},
	} {
		t.Run(name, func(t *testing.T) {
			l, err := New(c.rdb)
			if l != nil || err == nil {
				t.Fatalf("New returned %v, %v", l, err)
			}
			for _, want := range append(c.says, "redislock: configure") {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q does not say %q", err, want)
				}
			}
			if got := panicOf(func() { Middleware(c.rdb) }); got != err.Error() {
				t.Errorf("Middleware panics with %v, New says %q", got, err)
			}
		})
	}
}

func TestWhatIsInRangeIsTaken(t *testing.T) {
	for name, opt := range map[string]Option{
		"nothing":             Options(),
		"TTL of a second":     WithTTL(time.Second),
		"TTL of a year":       WithTTL(365 * 24 * time.Hour),
		"shortest done-for":   WithDoneFor(time.Millisecond),
		"no done-for":         WithDoneFor(0),
		"no grace period":     WithGracePeriod(0),
		"Retry(0)":            WithPolicy(Retry(0)),
		"Wait(0)":             WithPolicy(Wait(0)),
		"zero policy":         WithPolicy(Policy{}),
		"prefix of a byte":    WithKeyPrefix("x"),
		"longest prefix":      WithKeyPrefix(strings.Repeat("x", 100)),
		"prefix with a space": WithKeyPrefix("ключ 1:"),
		"silent logger":       WithLogger(slog.New(slog.DiscardHandler)),
		"pattern with spaces": WithTypes(" a "),
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := New(aClient(t), opt); err != nil {
				t.Error(err)
			}
			if p := panicOf(func() { Middleware(&byValue{UniversalClient: aClient(t)}, opt) }); p != nil {
				t.Errorf("Middleware panics with %v", p)
			}
		})
	}
}

// --- How options add up ---

func TestTheDefaultsAreThoseOfTheDocumentation(t *testing.T) {
	for name, c := range map[string]struct {
		opts   []Option
		policy Policy
	}{
		"none":                       {nil, Skip()},
		"WithKey":                    {[]Option{WithKey(ByType)}, Retry(0)},
		"WithKey, the default":       {[]Option{WithKey(ByTypeAndPayload)}, Retry(0)},
		"WithDoneFor":                {[]Option{WithDoneFor(time.Hour)}, Retry(0)},
		"WithDoneFor, none":          {[]Option{WithDoneFor(0)}, Skip()},
		"WithDoneFor and taken back": {[]Option{WithDoneFor(time.Hour), WithDoneFor(0)}, Skip()},
		"a policy before":            {[]Option{WithPolicy(Archive()), WithKey(ByType)}, Archive()},
		"a policy after":             {[]Option{WithDoneFor(time.Hour), WithPolicy(Skip())}, Skip()},
		"a policy and the zero one":  {[]Option{WithPolicy(Archive()), WithPolicy(Policy{}), WithKey(ByType)}, Retry(0)},
	} {
		t.Run(name, func(t *testing.T) {
			l, err := New(aClient(t), c.opts...)
			if err != nil {
				t.Fatal(err)
			}
			if l.policy.kind != c.policy.kind || l.policy.d != c.policy.d {
				t.Errorf("policy is %+v, want %+v", l.policy, c.policy)
			}
			if l.ttl != 30*time.Second || l.prefix != "redislock:" || l.grace != 5*time.Minute || l.failOpen || l.types != nil {
				t.Errorf("TTL %s, prefix %q, grace period %s, fail-open %v, types %q", l.ttl, l.prefix, l.grace, l.failOpen, l.types)
			}
		})
	}
}

func TestLaterOptionsWin(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var first, second bytes.Buffer
		h := w.Host("h")
		shared := Options(
			WithKey(ByTypeAndPayload), WithTypes("old"), WithKeyPrefix("old:"), WithTTL(time.Hour), WithPolicy(Archive()),
			WithDoneFor(time.Hour), WithGracePeriod(time.Hour), WithLogger(debugLogger(&first)),
		)
		l, err := New(h.RDB, shared, WithKey(ByType), WithTypes("new"), WithKeyPrefix("new:"), WithTTL(10*time.Second), WithPolicy(Retry(time.Hour)),
			Options(WithDoneFor(time.Minute), WithGracePeriod(0)), WithLogger(debugLogger(&second)))
		if err != nil {
			t.Fatal(err)
		}
		task := func(payload string) *asynq.Task { return asynq.NewTask("new", []byte(payload)) }
		err = l.Middleware(asynq.HandlerFunc(func(ctx context.Context, _ *asynq.Task) error {
			keys := lockKeys(w)
			if len(keys) != 1 || !strings.HasPrefix(keys[0], "new:{new:") || w.Redis.TTL(keys[0]) != 10*time.Second {
				t.Errorf("keys %q with TTL %s", keys, w.Redis.TTL(keys[0]))
			}
			var held *HeldError
			if err := l.Middleware(asynq.NotFoundHandler()).ProcessTask(t.Context(), task("other")); !errors.As(err, &held) || held.RetryIn < 48*time.Minute {
				t.Errorf("another payload of the type gets %v, want to come back in an hour", err)
			}
			if err := l.Middleware(asynq.HandlerFunc(func(context.Context, *asynq.Task) error { return errPrinter })).
				ProcessTask(t.Context(), asynq.NewTask("old", nil)); err != errPrinter || len(lockKeys(w)) != 1 {
				t.Errorf("a task of the earlier types gets %v", err)
			}
			return nil
		})).ProcessTask(t.Context(), task("one"))
		if err != nil {
			t.Error(err)
		}
		if ttl := w.Redis.TTL(lockKeys(w)[0]); ttl != time.Minute {
			t.Errorf("the marker lives for %s, want a minute", ttl)
		}
		if first.Len() != 0 || second.Len() == 0 {
			t.Errorf("logged to the first:\n%s\nto the second:\n%s", &first, &second)
		}
		// The bundle is as it was, for others to use.
		again, err := New(h.RDB, shared)
		if err != nil || again.ttl != time.Hour || again.prefix != "old:" || !slices.Equal(again.types, []string{"old"}) {
			t.Errorf("the bundle gives TTL %s, prefix %q, types %q now (%v)", again.ttl, again.prefix, again.types, err)
		}
	})
}

func debugLogger(out io.Writer) *slog.Logger {
	return slog.New(slog.NewTextHandler(out, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

func TestOptionsKeepNothingOfTheCallers(t *testing.T) {
	patterns := []string{"mail:", "sms:"}
	opt := WithTypes(patterns...)
	patterns[0] = "fax:"
	l, err := New(aClient(t), opt)
	if err != nil || !l.handles("mail:a") || l.handles("fax:a") {
		t.Errorf("types are %q (%v) after the caller changed the slice", l.types, err)
	}
}

func TestObserversAddUpAndAPanickingOneIsContained(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var seen []string
		var lines bytes.Buffer
		observer := func(name string, p any) Option {
			return WithObserver(func(_ context.Context, e Event) {
				seen = append(seen, fmt.Sprint(name, " ", e.Kind))
				if p != nil {
					panic(p)
				}
			})
		}
		l, err := New(w.Host("h").RDB, observer("a", nil), Options(observer("b", "out of disk"), observer("c", errPrinter)), observer("d", nil),
			WithLogger(debugLogger(&lines)))
		if err != nil {
			t.Fatal(err)
		}
		ran := false
		err = l.Middleware(asynq.HandlerFunc(func(context.Context, *asynq.Task) error {
			ran = true
			return errPrinter
		})).ProcessTask(t.Context(), asynq.NewTask("print", nil))
		if !ran || err != errPrinter {
			t.Errorf("ran: %v, result %v", ran, err)
		}
		var want []string
		for _, kind := range []EventKind{EventAcquired, EventReleased, EventRan} {
			for _, name := range []string{"a", "b", "c", "d"} {
				want = append(want, fmt.Sprint(name, " ", kind))
			}
		}
		if !slices.Equal(seen, want) {
			t.Errorf("observers saw %q, want %q", seen, want)
		}
		if n := strings.Count(lines.String(), "level=ERROR"); n != 6 || !strings.Contains(lines.String(), "out of disk") {
			t.Errorf("%d error lines, want one for each of the six panics:\n%s", n, &lines)
		}
		if keys := lockKeys(w); len(keys) != 0 {
			t.Errorf("keys left: %q", keys)
		}
	})
}

func TestAnObserverMayUseTheLocker(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var l *Locker
		h := w.Host("h")
		l, err := New(h.RDB, WithLogger(h.Logger), WithKey(ByType), WithPolicy(Wait(time.Minute)), WithObserver(func(ctx context.Context, e Event) {
			if k, ok := FromContext(ctx); ok && e.Kind == EventAcquired {
				if err := k.Check(context.WithoutCancel(ctx)); err != nil {
					t.Error(err)
				}
			}
			if _, _, err := l.Holder(context.WithoutCancel(ctx), "anything"); err != nil {
				t.Error(err)
			}
		}))
		if err != nil {
			t.Fatal(err)
		}
		var runs virtual.Tally
		w.Spawn(func() { _ = l.Middleware(working(&runs)).ProcessTask(t.Context(), job("work", time.Minute)) })
		time.Sleep(30 * time.Second)
		if err := l.Middleware(working(&runs)).ProcessTask(t.Context(), job("work", 0)); err != nil || runs.Count("work") != 2 {
			t.Errorf("%d runs, %v", runs.Count("work"), err)
		}
	})
}

// --- What is logged ---

// logbook is a slog.Handler that keeps its lines.
type logbook struct {
	mu    sync.Mutex
	lines []logEntry
	least slog.Level
}

type logEntry struct {
	level slog.Level
	text  string
	attrs map[string]string
}

func (l *logbook) Enabled(_ context.Context, level slog.Level) bool { return level >= l.least }
func (l *logbook) WithAttrs([]slog.Attr) slog.Handler               { return l }
func (l *logbook) WithGroup(string) slog.Handler                    { return l }

func (l *logbook) Handle(_ context.Context, r slog.Record) error {
	entry := logEntry{r.Level, r.Message, map[string]string{}}
	r.Attrs(func(a slog.Attr) bool { entry.attrs[a.Key] = a.Value.String(); return true })
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, entry)
	return nil
}

// all returns the lines whose text contains part.
func (l *logbook) all(part string) (found []logEntry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, entry := range l.lines {
		if strings.Contains(entry.text, part) {
			found = append(found, entry)
		}
	}
	return found
}

// An on-call engineer greps for a task or a key and must see from one line what became of it, and who is to blame.
func TestALogLineNamesTheKeyTheTaskAndWhoStandsInTheWay(t *testing.T) {
	const holder = `task t-7 (work, queue "night") on db7 pid 4711 since 2024-02-29T23:00:00Z`
	holding := Holder{TaskID: "t-7", TaskType: "work", Queue: "night", Host: "db7", PID: 4711, Since: time.Date(2024, 2, 29, 23, 0, 0, 0, time.UTC)}
	done := holding
	done.Done = true
	put := func(value string) func(*virtual.World, *virtual.Host, string) {
		return func(w *virtual.World, _ *virtual.Host, key string) { _ = w.Redis.Set(key, value) }
	}
	refuse := func(text string) func(*virtual.World, *virtual.Host, string) {
		return func(_ *virtual.World, h *virtual.Host, _ string) { h.LockLink.Every("SET").Refuse(text) }
	}
	nothing := func(*virtual.World, *virtual.Host, string) {}
	idle := func(context.Context, *virtual.World, *virtual.Host) error { return nil }

	for name, c := range map[string]struct {
		opt     Option
		before  func(w *virtual.World, h *virtual.Host, key string)
		handler func(ctx context.Context, w *virtual.World, h *virtual.Host) error
		text    string
		level   slog.Level
		attrs   map[string]string // parts of the values; "self" stands for this task as a holder
	}{
		"skipped": {WithPolicy(Skip()), put(encodeValue(holding, "x")), idle,
			"task skipped: another task holds the lock", slog.LevelInfo, map[string]string{"holder": holder}},
		"done": {WithPolicy(Skip()), put(encodeValue(done, "x")), idle,
			"task skipped: its work is done", slog.LevelInfo, map[string]string{"holder": holder}},
		"put back": {WithPolicy(Retry(time.Hour)), put(encodeValue(holding, "x")), idle,
			"task put back: it did not run", slog.LevelInfo, map[string]string{"holder": holder}},
		"put back after a wait": {WithPolicy(Wait(3 * time.Second)), put(encodeValue(holding, "x")), idle,
			"task put back: it did not run", slog.LevelInfo, map[string]string{"holder": holder, "waited": "3s"}},
		"put back, holder unreadable": {WithPolicy(Skip()), put("redislock/2 ?"), idle,
			"task put back: it did not run", slog.LevelInfo, map[string]string{"holder|reason": "a holder this version cannot read"}},
		"put back, unreachable": {WithPolicy(Skip()), func(_ *virtual.World, h *virtual.Host, _ string) { h.LockLink.Cut() }, idle,
			"task put back: it did not run, since its lock could not be asked for", slog.LevelWarn, map[string]string{"reason": "connection refused"}},
		"put back, no service": {WithPolicy(Skip()), refuse("MISCONF Redis is configured to save"), idle,
			"task put back: it did not run, since its lock could not be asked for", slog.LevelWarn, map[string]string{"reason": "MISCONF Redis is configured to save"}},
		"archived": {WithPolicy(Archive()), put(encodeValue(holding, "x")), idle,
			"task archived: it did not run", slog.LevelWarn, map[string]string{"holder": holder}},
		"archived by a PolicyFunc": {
			WithPolicy(deciding(func(held *HeldError) error { return fmt.Errorf("tenant on hold: %w: %w", held, asynq.SkipRetry) })),
			put(encodeValue(holding, "x")), idle,
			"task archived: it did not run", slog.LevelWarn, map[string]string{"holder": holder, "reason": "tenant on hold"}},
		"failed by a PolicyFunc": {WithPolicy(deciding(func(*HeldError) error { return errPrinter })), put(encodeValue(holding, "x")), idle,
			"task failed: it did not run", slog.LevelWarn, map[string]string{"holder": holder, "reason": errPrinter.Error()}},
		"failed": {WithPolicy(Skip()), refuse("NOPERM no permissions"), idle,
			"task failed: it did not run", slog.LevelWarn, map[string]string{"reason": "NOPERM no permissions"}},
		"failed, foreign text": {WithPolicy(Skip()), put("my notes"), idle,
			"task failed: it did not run", slog.LevelWarn, map[string]string{"reason": "not a lock"}},
		"lost": {WithPolicy(Skip()), nothing, func(ctx context.Context, w *virtual.World, _ *virtual.Host) error {
			w.Redis.Del(lockKeys(w)[0])
			<-ctx.Done()
			return nil
		}, "lock lost: the work may be running elsewhere too", slog.LevelError, map[string]string{"holder": "self", "held": "", "reason": "gone or somebody else's"}},
		"lost in silence": {WithPolicy(Skip()), nothing, func(ctx context.Context, _ *virtual.World, h *virtual.Host) error {
			h.LockLink.Cut()
			<-ctx.Done()
			return nil
		}, "lock lost: the work may be running elsewhere too", slog.LevelError, map[string]string{"holder": "self", "held": "9s", "reason": "not confirmed it in time"}},
		"abandoned": {Options(WithPolicy(Skip()), WithGracePeriod(2*time.Second)), nothing, func(_ context.Context, w *virtual.World, _ *virtual.Host) error {
			w.Deaf(30 * time.Second)
			return nil
		}, "lock abandoned", slog.LevelError, map[string]string{"holder": "self", "held": "", "reason": "still runs 2s after its context ended"}},
		"released without confirmation": {WithPolicy(Skip()), nothing, func(_ context.Context, _ *virtual.World, h *virtual.Host) error {
			h.LockLink.Cut()
			return nil
		}, "lock released without confirmation", slog.LevelWarn, map[string]string{"holder": "self", "reason": ErrUnavailable.Error()}},
		"unlocked": {Options(WithPolicy(Skip()), WithFailOpen()), refuse("OOM command not allowed"), idle,
			"task runs without a lock", slog.LevelWarn, map[string]string{"reason": "OOM command not allowed"}},
	} {
		t.Run(name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var lines logbook
				h := w.Host("h")
				l, err := New(h.RDB, WithTTL(10*time.Second), c.opt, WithLogger(slog.New(&lines)))
				if err != nil {
					t.Fatal(err)
				}
				lockName, _ := l.Name(t.Context(), job("work", 0))
				key, _ := l.redisKey(lockName)
				c.before(w, h, key)
				h.Serve(ServerConfig(asynq.Config{Queues: map[string]int{"day": 1}}), l.Middleware(asynq.HandlerFunc(
					func(ctx context.Context, _ *asynq.Task) error { return c.handler(ctx, w, h) })))
				info := w.Enqueue(job("work", 0), asynq.Queue("day"), asynq.MaxRetry(5), asynq.Timeout(20*time.Second))
				w.Until(time.Minute, "the line logged", func() bool { return len(lines.all(c.text)) > 0 })

				line := lines.all(c.text)[0]
				if line.level != c.level || !strings.HasPrefix(line.text, "redislock: ") {
					t.Errorf("%s %q, want %s and the package in front", line.level, line.text, c.level)
				}
				want := map[string]string{"key": key, "task_id": info.ID, "task_type": "work"}
				for attr, part := range c.attrs {
					want[attr] = part
				}
				for attr, part := range want {
					if part == "self" {
						part = fmt.Sprintf(`task %s (work, queue "day") on %s pid %d`, info.ID, l.host, l.pid)
					}
					found := slices.ContainsFunc(strings.Split(attr, "|"), func(name string) bool {
						value, ok := line.attrs[name]
						return ok && strings.Contains(value, part)
					})
					if !found {
						t.Errorf("%s does not say %q: %q %v", attr, part, line.text, line.attrs)
					}
				}
			})
		})
	}
}

// A task on its last attempt may stay for long, and gives no other sign of life.
func TestALastAttemptThatWaitsSaysSoOnce(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var lines logbook
		h := w.Host("h")
		l, err := New(h.RDB, WithLogger(slog.New(&lines)), WithPolicy(Retry(0)))
		if err != nil {
			t.Fatal(err)
		}
		lockName, _ := l.Name(t.Context(), job("work", 0))
		key, _ := l.redisKey(lockName)
		_ = w.Redis.Set(key, heldByOther)
		h.Serve(ServerConfig(asynq.Config{}), l.Middleware(asynq.NotFoundHandler()))
		w.Enqueue(job("work", 0), asynq.MaxRetry(0), asynq.Timeout(time.Minute))
		time.Sleep(30 * time.Second)
		got := lines.all("")
		if len(got) != 1 || got[0].level != slog.LevelInfo || !strings.Contains(got[0].text, "waits in place") ||
			got[0].attrs["key"] != key || !strings.Contains(got[0].attrs["holder"], "task other") {
			t.Errorf("logged %v; want one line that says who is waited for", got)
		}
	})
}

func TestWhileAllIsWellNothingIsLoggedButForDebugging(t *testing.T) {
	for least, want := range map[slog.Level][]string{
		slog.LevelInfo:  nil,
		slog.LevelDebug: {"redislock: lock acquired", "redislock: lock released", "redislock: task ran"},
	} {
		t.Run(least.String(), func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				lines := logbook{least: least}
				h := w.Host("h")
				l, err := New(h.RDB, WithTTL(2*time.Second), WithLogger(slog.New(&lines)))
				if err != nil {
					t.Fatal(err)
				}
				h.Serve(ServerConfig(asynq.Config{}), l.Middleware(asynq.HandlerFunc(func(ctx context.Context, _ *asynq.Task) error {
					return virtual.Busy(ctx, 10*time.Second)
				})))
				w.Enqueue(job("work", 0))
				w.Until(20*time.Second, "task done", func() bool { return w.Drained() })
				var texts []string
				for _, line := range lines.all("") {
					texts = append(texts, line.text)
				}
				if !slices.Equal(texts, want) {
					t.Errorf("logged %q, want %q", texts, want)
				}
			})
		})
	}
}

func TestTheDefaultLoggerIsThatOfTheMoment(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		l, err := New(w.Host("h").RDB)
		if err != nil {
			t.Fatal(err)
		}
		defer slog.SetDefault(slog.Default())
		var lines bytes.Buffer
		slog.SetDefault(debugLogger(&lines))
		if err := l.Do(t.Context(), "work", func(context.Context) error { return nil }); err != nil {
			t.Error(err)
		}
		if !strings.Contains(lines.String(), "lock acquired") {
			t.Errorf("the logger that was set after New got %q", &lines)
		}
	})
}

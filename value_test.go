package redislock

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"example.com/redislock/internal/virtual"
	"github.com/hibiken/asynq"
)

func TestAValueIsReadableAndItsLayoutDoesNotChange(t *testing.T) {
	h := Holder{
		TaskID: "t-7", TaskType: "report:nightly", Queue: "night", Host: "db7", PID: 4711,
		Since: time.Date(2024, 2, 29, 23, 0, 0, 123456789, time.FixedZone("", 3600)),
	}
	const layout = `redislock/1 {"task_id":"t-7","task_type":"report:nightly","queue":"night","host":"db7","pid":4711,` +
		`"since":"2024-02-29T22:00:00.123Z","token":"f00d"}`
	if got := encodeValue(h, "f00d"); got != layout {
		t.Errorf("a lock is written as\n%s, want\n%s", got, layout)
	}
	h.Done = true
	if got, want := encodeValue(h, "f00d"), strings.Replace(layout, `,"token"`, `,"done":true,"token"`, 1); got != want {
		t.Errorf("a marker is written as\n%s, want\n%s", got, want)
	}
	// What a later version adds to this one must not keep it from being read.
	more := strings.Replace(layout, `"pid"`, `"zone":"b","pid"`, 1)
	if got, err := decodeValue(more); err != nil || got.TaskID != "t-7" || got.PID != 4711 {
		t.Errorf("with another field it reads as %+v, %v", got, err)
	}
}

func TestAValueComesBackAsItWasWritten(t *testing.T) {
	since := time.Date(2024, 2, 29, 23, 0, 0, 123e6, time.UTC)
	for name, h := range map[string]Holder{
		"a task":    {TaskID: "7b0c", TaskType: "report:nightly", Queue: "default", Host: "h1", PID: 1, Since: since},
		"no task":   {Host: "h1", PID: 1, Since: since},
		"a marker":  {TaskID: "7b0c", TaskType: "x", Queue: "q", Host: "h1", PID: 1, Since: since, Done: true},
		"oddities":  {TaskID: `"}{\`, TaskType: "a\x00\n\u2028<&>", Queue: "žluť 🐎", Host: "redislock/1 ", PID: -1, Since: since},
		"all zeros": {},
		"very long": {TaskID: strings.Repeat("x", 1<<16), Since: since},
	} {
		t.Run(name, func(t *testing.T) {
			value := encodeValue(h, "token")
			if got, err := decodeValue(value); err != nil || got != h {
				t.Errorf("written as %+v, read as %+v (%v)", h, got, err)
			}
			if !strings.HasPrefix(value, "redislock/1 ") || !utf8.ValidString(value) {
				t.Errorf("value is %q", value)
			}
		})
	}
}

func TestEachAcquisitionHasAValueOfItsOwn(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		l := locker(w.Host("h"), &b)
		seen := map[string]bool{}
		for range 100 { // at one and the same instant, by one process
			if err := l.Do(t.Context(), "work", func(context.Context) error {
				value, _ := w.Redis.Get(lockKeys(w)[0])
				seen[value] = true
				return nil
			}); err != nil {
				t.Fatal(err)
			}
		}
		if len(seen) != 100 {
			t.Errorf("%d values for 100 locks", len(seen))
		}
	})
}

// ofOthers are values that this version did not write.
var ofOthers = map[string]error{
	"":                                     errForeignValue,
	"x":                                    errForeignValue,
	"redislock":                            errForeignValue,
	"Redislock/1 {}":                       errForeignValue,
	" redislock/1 {}":                      errForeignValue,
	"\x00\xff":                             errForeignValue,
	"redislock/1 ":                         errForeignValue,
	"redislock/1 {":                        errForeignValue,
	"redislock/1 null":                     errForeignValue,
	"redislock/1 []":                       errForeignValue,
	"redislock/1 {}":                       errForeignValue, // no token: we never wrote that
	`redislock/1 {"pid":"x","token":"t"}`:  errForeignValue,
	`redislock/1 {"pid":1e99,"token":"t"}`: errForeignValue,
	`redislock/1 {"since":"today","token":"t"}`: errForeignValue,
	`redislock/1 {"token":"t"} {}`:              errForeignValue,
	"redislock/":                                errUnknownFormat,
	"redislock/1":                               errUnknownFormat,
	"redislock/1{}":                             errUnknownFormat,
	"redislock/10 {}":                           errUnknownFormat,
	"redislock/2 \x00\xff":                      errUnknownFormat,
	"redislock/1.1 {}":                          errUnknownFormat,
}

func TestAValueOfOthersIsToldFromOneOfAnotherVersion(t *testing.T) {
	for value, want := range ofOthers {
		h, err := decodeValue(value)
		if err != want || h != (Holder{}) {
			t.Errorf("%q reads as %+v, %v; want %v", value, h, err, want)
		}
	}
}

func FuzzDecodeValue(f *testing.F) {
	for value := range ofOthers {
		f.Add(value)
	}
	f.Add(encodeValue(Holder{TaskID: "a", TaskType: "b", Queue: "c", Host: "d", PID: 5, Since: time.Unix(1e9, 0), Done: true}, "token"))
	f.Add(`redislock/1 {"since":"0000-01-01T00:00:00+23:59","token":"t"}`)
	f.Fuzz(func(t *testing.T, value string) {
		h, err := decodeValue(value)
		switch {
		case !strings.HasPrefix(value, "redislock/"):
			if err != errForeignValue {
				t.Errorf("foreign text: %v", err)
			}
		case !strings.HasPrefix(value, "redislock/1 "):
			if err != errUnknownFormat {
				t.Errorf("another version: %v", err)
			}
		case err != nil && err != errForeignValue:
			t.Errorf("our version: %v", err)
		}
		if err != nil && h != (Holder{}) {
			t.Errorf("an error and a holder: %+v", h)
		}
		_ = h.String()
		_ = (&HeldError{Key: "k", Holder: h}).Error()
		if h.Since.Year() < 1 || h.Since.Year() > 9998 {
			return // no clock of ours; what is read is never written again
		}
		h.Since = h.Since.UTC().Truncate(time.Millisecond)
		if again, err := decodeValue(encodeValue(h, "token")); err != nil || !again.Since.Equal(h.Since) || again.String() != h.String() {
			t.Errorf("read %+v, wrote and read %+v (%v)", h, again, err)
		}
	})
}

// Whoever wrote it may be a run of this very task, so nothing but patience is safe: this is how rolling deployments meet.
func TestALockOfAnotherVersionIsWaitedForUnderEveryPolicy(t *testing.T) {
	for name, opt := range map[string]Option{
		"Skip": WithPolicy(Skip()), "Retry": WithPolicy(Retry(time.Hour)), "Wait": WithPolicy(Wait(time.Second)), "Archive": WithPolicy(Archive()),
		"PolicyFunc": WithPolicy(deciding(func(*HeldError) error { return nil })), "fail-open": Options(WithPolicy(Skip()), WithFailOpen()),
		"done-for": WithDoneFor(time.Hour),
	} {
		for _, retry := range []int{0, 1} {
			t.Run(name+", MaxRetry "+string(rune('0'+retry)), func(t *testing.T) {
				virtual.Run(t, func(t *testing.T, w *virtual.World) {
					const theirs = "redislock/2 holder=job-1;done=yes"
					var b books
					var runs virtual.Tally
					h := w.Host("h")
					l := locker(h, &b, WithTTL(4*time.Second), opt)
					lockName, _ := l.Name(t.Context(), job("work", 0))
					key, _ := l.redisKey(lockName)
					_ = w.Redis.Set(key, theirs)
					h.Serve(ServerConfig(asynq.Config{}), l.Middleware(working(&runs)))
					info := w.Enqueue(job("work", 0), asynq.MaxRetry(retry), asynq.Timeout(10*time.Minute))
					time.Sleep(6 * time.Second)
					if value, _ := w.Redis.Get(key); value != theirs || runs.Count("work") != 0 {
						t.Errorf("at the key is %q, %d runs", value, runs.Count("work"))
					}
					if s := w.State(info); s == "gone" || s == "archived" {
						t.Errorf("task is %s", s)
					}
					w.Untouched(info)
					if _, _, err := l.Holder(t.Context(), lockName); !errors.Is(err, errUnknownFormat) {
						t.Errorf("Holder says %v", err)
					}
					w.Redis.Del(key)
					w.Until(10*time.Second, "task done", func() bool { return w.State(info) == "gone" })
					if runs.Count("work") != 1 {
						t.Errorf("%d runs, want 1", runs.Count("work"))
					}
					b.balance(t, 1+b.count(EventRequeued))
				})
			})
		}
	}
}

func TestHolderReadsWhatIsAtTheKey(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		h := w.Host("h")
		l := locker(h, &b, WithDoneFor(time.Hour))
		look := func(name string) (Holder, bool) {
			t.Helper()
			holder, ok, err := l.Holder(t.Context(), name)
			if err != nil {
				t.Error(err)
			}
			return holder, ok
		}
		if holder, ok := look("work"); ok || holder != (Holder{}) {
			t.Errorf("a free lock is held by %v", holder)
		}
		began := time.Now()
		if err := l.Do(t.Context(), "work", func(context.Context) error {
			time.Sleep(time.Minute)
			if holder, ok := look("work"); !ok || holder.Done || holder.Host != l.host || holder.PID != l.pid || !holder.Since.Equal(began) {
				t.Errorf("holder is %+v, %v", holder, ok)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		if holder, ok := look("work"); !ok || !holder.Done || !holder.Since.Equal(began.Add(time.Minute)) {
			t.Errorf("marker is %+v, %v", holder, ok)
		}
		for value, want := range ofOthers {
			_ = w.Redis.Set(lockKeys(w)[0], value)
			_, ok, err := l.Holder(t.Context(), "work")
			if ok || !errors.Is(err, want) || !strings.Contains(err.Error(), lockKeys(w)[0]) || len(value) > 12 && strings.Contains(err.Error(), value) {
				t.Errorf("with %q at the key: %v, %v", value, ok, err)
			}
		}
		h.LockLink.Cut()
		if _, ok, err := l.Holder(t.Context(), "work"); ok || !errors.Is(err, ErrUnavailable) {
			t.Errorf("out of reach: %v, %v", ok, err)
		}
	})
}

package redislock

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"example.com/redislock/internal/virtual"
	"github.com/hibiken/asynq"
)

// Facts at the edges where two rules meet.

// noWork is a handler that has nothing to do.
var noWork = asynq.HandlerFunc(func(context.Context, *asynq.Task) error { return nil })

// occupy holds the lock of a task until the returned function is called.
func occupy(t *testing.T, l *Locker, task *asynq.Task) (free func()) {
	t.Helper()
	name, err := l.Name(t.Context(), task)
	if err != nil {
		t.Fatal(err)
	}
	lock, err := l.TryAcquire(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	return func() { _ = lock.Release(context.Background()) }
}

func TestWaitKeepsClearOfTheTasksOwnDeadline(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		h := w.Host("host")
		l := locker(h, &b, WithPolicy(Wait(time.Minute)), WithKey(ByType))
		free := occupy(t, l, asynq.NewTask("x", nil))
		h.Serve(ServerConfig(asynq.Config{}), l.Middleware(noWork))
		short := w.Enqueue(asynq.NewTask("x", nil), asynq.Timeout(10*time.Second), asynq.MaxRetry(3))
		time.Sleep(2 * time.Minute)
		if info := w.Task(short); info == nil || info.Retried != 0 || w.Stats("default").Failed != 0 {
			t.Errorf("contention was counted: %+v", info)
		}
		free()
		w.Until(2*time.Minute, "the task has run", func() bool { return w.State(short) == "gone" })
	})
}

func TestShutdownReturnsAfterTheOutcomeIsTold(t *testing.T) {
	for name, opts := range map[string]Option{"under a lock": Options(), "without one": WithFailOpen()} {
		t.Run(name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				h := w.Host("host")
				l := locker(h, &books{}, opts, WithObserver(func(ctx context.Context, e Event) {
					if e.Kind == EventRan {
						time.Sleep(time.Second)
					}
					b.observe(ctx, e)
				}))
				if name == "without one" {
					h.LockLink.Cut()
				}
				began := make(chan struct{})
				w.Spawn(func() {
					_ = l.Middleware(asynq.HandlerFunc(func(context.Context, *asynq.Task) error {
						close(began)
						time.Sleep(10 * time.Second)
						return nil
					})).ProcessTask(context.Background(), asynq.NewTask("x", nil))
				})
				<-began
				if err := l.Shutdown(t.Context()); err != nil {
					t.Error(err)
				}
				b.balance(t, 1)
			})
		})
	}
}

func TestNoLockIsHandedOutOnceShutdownHasStoppedWaiting(t *testing.T) {
	for name, slowly := range map[string]func(*virtual.Host){
		"the acquire is slow":  func(h *virtual.Host) { h.LockLink.Next("SET").Delay(2 * time.Second) },
		"the observer is slow": func(*virtual.Host) {},
	} {
		t.Run(name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				h := w.Host("host")
				slowly(h)
				l := locker(h, &b, WithObserver(func(_ context.Context, e Event) {
					if e.Kind == EventAcquired && name == "the observer is slow" {
						time.Sleep(2 * time.Second)
					}
				}))
				result := make(chan error, 1)
				w.Spawn(func() {
					result <- l.Do(context.Background(), "late", func(context.Context) error {
						t.Error("it runs after Shutdown has returned")
						return nil
					})
				})
				time.Sleep(time.Second)
				ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
				defer cancel()
				if err := l.Shutdown(ctx); !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("Shutdown: %v", err)
				}
				if err := <-result; !errors.Is(err, ErrClosed) {
					t.Errorf("Do: %v", err)
				}
				if err := l.Shutdown(t.Context()); err != nil {
					t.Error(err)
				}
				if w.Redis.Exists("redislock:{late}") {
					t.Error("the key is left")
				}
				b.balance(t, 0)
			})
		})
	}
}

func TestATaskThatAnInnerLockDropsLeavesNoMarkerAtTheOuter(t *testing.T) {
	for name, around := range map[string]func(*Locker, asynq.Handler) asynq.Handler{
		"middleware": (*Locker).Middleware,
		"Do": func(outer *Locker, next asynq.Handler) asynq.Handler {
			return asynq.HandlerFunc(func(ctx context.Context, task *asynq.Task) error {
				return outer.Do(ctx, "job", func(ctx context.Context) error { return next.ProcessTask(ctx, task) })
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			virtual.Run(t, func(t *testing.T, w *virtual.World) {
				var b books
				h := w.Host("host")
				outer := locker(h, &b, WithDoneFor(time.Hour))
				inner := locker(h, &b, WithKey(ByType), WithPolicy(Skip()), WithKeyPrefix("inner:"))
				ran := 0
				handler := around(outer, inner.Middleware(asynq.HandlerFunc(func(context.Context, *asynq.Task) error {
					ran++
					return nil
				})))
				task := asynq.NewTask("x", []byte("1"))
				free := occupy(t, inner, task)
				if err := handler.ProcessTask(t.Context(), task); err != nil {
					t.Error(err)
				}
				free()
				for range 2 {
					if err := handler.ProcessTask(t.Context(), task); err != nil && !errors.Is(err, ErrDone) {
						t.Error(err)
					}
				}
				if ran != 1 {
					t.Errorf("ran %d times, want once: %s", ran, &b)
				}
			})
		})
	}
}

func TestALockFreedDuringATryIsNotSleptThrough(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		h := w.Host("host")
		l := locker(h, &b, WithPolicy(Wait(time.Minute)), WithKey(ByType))
		free := occupy(t, l, asynq.NewTask("x", nil))
		ran := make(chan struct{})
		w.Spawn(func() {
			_ = l.Middleware(asynq.HandlerFunc(func(context.Context, *asynq.Task) error {
				close(ran)
				return nil
			})).ProcessTask(context.Background(), asynq.NewTask("x", nil))
		})
		time.Sleep(20 * time.Second)
		release, freed := make(chan struct{}), make(chan struct{})
		var at time.Time
		h.LockLink.Next(releaseScript.Hash()).Before(func() { <-release })
		h.LockLink.Next("SET").After(func() {
			close(release)
			<-freed
			at = time.Now()
		})
		free()
		close(freed)
		<-ran
		if waited := time.Since(at); waited > 10*time.Millisecond { // a poll would be up to 250 ms away
			t.Errorf("handed over after %v", waited)
		}
	})
}

func TestAnEventNamesThePanicAndNotTheOutage(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		h := w.Host("host")
		l := locker(h, &b, WithFailOpen())
		h.LockLink.Cut()
		func() {
			defer func() { _ = recover() }()
			_ = l.Middleware(asynq.HandlerFunc(func(context.Context, *asynq.Task) error { panic("on purpose") })).
				ProcessTask(t.Context(), asynq.NewTask("x", nil))
		}()
		if e := b.of(EventRan)[0]; !errors.Is(e.Err, errUnfinished) || !e.Unlocked || e.Held != 0 {
			t.Errorf("%+v", e)
		}
	})
}

func TestAPolicyFuncThatRevokesDropsTheTask(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		h := w.Host("host")
		l := locker(h, &b, WithKey(ByType), WithPolicy(PolicyFunc(func(_ context.Context, _ *asynq.Task, held *HeldError) error {
			return fmt.Errorf("not now: %w: %w", held, asynq.RevokeTask)
		})))
		defer occupy(t, l, asynq.NewTask("x", nil))()
		h.Serve(ServerConfig(asynq.Config{}), l.Middleware(noWork))
		task := w.Enqueue(asynq.NewTask("x", nil))
		w.Until(time.Minute, "the task is gone", func() bool { return w.State(task) == "gone" })
		if b.count(EventSkipped) != 1 {
			t.Error(&b)
		}
	})
}

func TestAnArchivedTaskDoesNotSayRetry(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		h := w.Host("host")
		l := locker(h, &b, WithKey(ByType))
		defer occupy(t, l, asynq.NewTask("x", nil))()
		h.Serve(ServerConfig(asynq.Config{}), l.Middleware(noWork))
		task := w.Enqueue(asynq.NewTask("x", nil), asynq.MaxRetry(0), asynq.Timeout(5*time.Second))
		w.Until(time.Minute, "the task is archived", func() bool { return w.State(task) == "archived" })
		if text := w.Task(task).LastErr; !strings.Contains(text, "held by") || strings.Contains(text, "retry in") {
			t.Errorf("last error %q", text)
		}
	})
}

func TestReleaseReturnsTheSameWhateverItsContext(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		lock, err := locker(w.Host("host"), &b).TryAcquire(t.Context(), "x")
		if err != nil {
			t.Fatal(err)
		}
		if err := lock.Release(t.Context()); err != nil {
			t.Error(err)
		}
		over, cancel := context.WithCancel(t.Context())
		cancel()
		for range 100 {
			if err := lock.Release(over); err != nil {
				t.Fatal(err)
			}
		}
	})
}

func TestTheLogKeepsAHandlersOwnWords(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		l := locker(w.Host("host"), &b)
		if err := w.Redis.Set("redislock:{y}", "redislock/2 of the future"); err != nil {
			t.Fatal(err)
		}
		_ = l.Middleware(asynq.HandlerFunc(func(ctx context.Context, _ *asynq.Task) error {
			return fmt.Errorf("step two: %w", l.Do(ctx, "y", func(context.Context) error { return nil }))
		})).ProcessTask(t.Context(), asynq.NewTask("x", nil))
		if !w.Logged("step two") {
			t.Error("the handler's error is not in the log")
		}
	})
}

func TestALongWaitIsInTheAcquiredEvent(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		l := locker(w.Host("host"), &b, WithPolicy(Wait(time.Minute)), WithKey(ByType))
		time.AfterFunc(10*time.Second, occupy(t, l, asynq.NewTask("x", nil)))
		if err := l.Middleware(noWork).ProcessTask(t.Context(), asynq.NewTask("x", nil)); err != nil {
			t.Error(err)
		}
		for _, e := range b.of(EventAcquired, EventRan)[1:] {
			if e.Waited < 10*time.Second {
				t.Errorf("%s: waited %v", e.Kind, e.Waited)
			}
		}
	})
}

func TestAVeryLongRetryDelayDoesNotOverflow(t *testing.T) {
	l := &Locker{config: config{ttl: defaultTTL}}
	for range 100 {
		if d := l.retryDelay(math.MaxInt64); d < 365*24*time.Hour {
			t.Fatalf("put back for %v", d)
		}
	}
}

func TestALossIsToldBeforeTheOutcome(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		l := locker(w.Host("host"), &books{}, WithObserver(func(ctx context.Context, e Event) {
			if e.Kind == EventLost {
				time.Sleep(time.Second) // and the handler does not wait for that
			}
			b.observe(ctx, e)
		}))
		_ = l.Middleware(asynq.HandlerFunc(func(ctx context.Context, _ *asynq.Task) error {
			lock, _ := FromContext(ctx)
			w.Redis.Del(lock.Key())
			<-ctx.Done()
			return context.Cause(ctx)
		})).ProcessTask(t.Context(), asynq.NewTask("x", nil))
		if told := b.of(EventLost, EventRan); len(told) != 2 || told[0].Kind != EventLost {
			t.Errorf("%v", told)
		}
		b.balance(t, 1)
	})
}

func TestTheBooksBalanceWhenShutdownDoesNotWaitForARelease(t *testing.T) {
	virtual.Run(t, func(t *testing.T, w *virtual.World) {
		var b books
		h := w.Host("host")
		l := locker(h, &b)
		lock, err := l.TryAcquire(t.Context(), "x")
		if err != nil {
			t.Fatal(err)
		}
		h.LockLink.Next("EVALSHA").SwallowReply()
		w.Spawn(func() { _ = lock.Release(context.Background()) })
		time.Sleep(100 * time.Millisecond)
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		if err := l.Shutdown(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Shutdown: %v", err)
		}
		b.balance(t, 0)
		if e := b.of(EventReleased); len(e) != 1 || !errors.Is(e[0].Err, ErrClosed) {
			t.Errorf("%v", e)
		}
		if err := l.Shutdown(t.Context()); err != nil {
			t.Error(err)
		}
		b.balance(t, 0)
	})
}
